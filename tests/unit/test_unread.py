"""The bound on output that clients don't read: who pays above it."""

from __future__ import annotations

from collections.abc import Hashable

from millstream_server.links.unread import UnreadOutput


class Request:
    """Satisfies `Gathering`; keeps what it holds until it overflows."""

    def __init__(self, unread: UnreadOutput, caller_key: Hashable) -> None:
        self.caller_key = caller_key
        self.ended = False
        self._unread = unread
        self._nbytes = 0

    def gather(self, nbytes: int) -> None:
        self._nbytes += nbytes
        self._unread.add(self, nbytes)

    def read(self) -> None:
        nbytes, self._nbytes = self._nbytes, 0
        self._unread.remove(self, nbytes)

    def overflowed(self) -> None:
        self.ended = True
        self.read()


def test_the_largest_of_the_caller_who_holds_most_pays() -> None:
    unread = UnreadOutput(100)
    greedy = [Request(unread, "greedy") for _ in range(3)]
    slow = Request(unread, "slow")
    slow.gather(40)  # the largest request of all, but its caller's only one
    for request, nbytes in zip(greedy, (15, 25, 15), strict=True):
        request.gather(nbytes)
    assert unread.used == 95
    slow.gather(6)
    assert [request.ended for request in greedy] == [False, True, False]
    assert not slow.ended
    assert unread.used == 76
    greedy[0].gather(30)
    assert [request.ended for request in greedy] == [True, True, False]
    assert not slow.ended
    assert unread.used == 61


def test_one_request_that_is_too_large_ends_alone() -> None:
    unread = UnreadOutput(100)
    small, large = Request(unread, "a"), Request(unread, "b")
    small.gather(30)
    large.gather(101)
    assert (small.ended, large.ended) == (False, True)
    small.read()
    assert unread.used == 0
