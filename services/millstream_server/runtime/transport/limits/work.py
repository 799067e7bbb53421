"""How much of the event loop's time connections' frames may take, and who is next."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_S = 0.002
"""Of one turn of the loop, for the bytes of all connections together; the rest waits for the next.
What the loop does for others waits for a few such turns, however many connections have much to
say."""
_SAVED_S = 0.1
"""Most time that a connection saves up: some 400 requests at once are served without a pause."""
_FIRST_S = 0.005
"""What a new connection has, a dozen requests: else a caller would get more by connecting anew."""
STREAM_S = 0.0002
"""What a stream costs besides its frames, whatever its handler does."""
REQUEST_S = 0.001
"""What its first message costs besides: a turn of a chat begins with it."""
MESSAGE_S = 0.00005
"""What each other message costs."""
_BEGUN_PART = 0.2
"""Of what requests take that have begun counts for their connection's share: the share is for
frames. Turns of the loop count all of it."""
_LEAST = 0.02
"""Of the loop's time, for any connection: twenty requests a second are held up by no number of
others. Those are held up by the turns."""
_MOST_S = 0.05
"""What a slice counts for at most, more than any frame takes: a garbage collection meanwhile is
nobody's fault."""
_SHORT_S = 0.004
"""Nearly all pieces of work take less; they count whole, whoever else used the machine then."""
_NEIGHBOUR_S = 1.0
"""So long after others were served, connections that take much are held back for them."""


class Waiting(Protocol):
    """A connection whose bytes wait for a turn."""

    @property
    def last(self) -> bool:
        """Whether others go first."""

    @property
    def new(self) -> bool:
        """Whether it has hardly begun: then it waits for other new ones only."""

    def go_on(self) -> None:
        """Take some of the bytes; calls `WorkShare.used`, maybe `WorkShare.wait` again."""


class WorkShare:
    """What a server's connections share of the loop's time; one per server."""

    def __init__(self, of_loop: float = 0.5) -> None:
        """Give all connections above their share together this part of the loop's time."""
        self.of_loop = of_loop
        self.greedy = 0
        """How many connections take more than their share."""
        self.modest_s = -_NEIGHBOUR_S
        """When a connection within its share was served last."""
        self.turn_s = TURN_S
        """What is left of this turn of the loop."""
        self._cpu_s = time.thread_time()
        """The thread's CPU time when it was read last."""
        self._first: deque[Waiting] = deque()
        self._new: deque[Waiting] = deque()
        self._last: deque[Waiting] = deque()
        self._next_turn: asyncio.Handle | None = None

    def cpu_s(self, took_s: float) -> float:
        """Return about how much CPU time was used in the ``took_s`` that have just passed.

        What other processes take of the machine is no caller's fault. Reading the thread's CPU time
        is a system call, which may cost more than a request's frames. So it is read only after
        long pieces: one counts for no more than was used since it was read last.
        """
        if took_s < _SHORT_S:
            return took_s
        last_s, self._cpu_s = self._cpu_s, time.thread_time()
        return min(took_s, self._cpu_s - last_s)

    def wait(self, connection: Waiting) -> None:
        """Let a connection go on in a later turn of the loop."""
        late = self._new if connection.new else self._last
        (late if connection.last else self._first).append(connection)
        self._expect_turn()

    def used(self, seconds: float) -> None:
        """Count what a connection's bytes took of this turn."""
        self.turn_s -= seconds
        self._expect_turn()

    def _expect_turn(self) -> None:
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Begin the next turn: those that wait go on while there is time.

        In every turn one of each kind does, so that none waits for ever: those that bring messages
        first, then those that are new.
        """
        self._next_turn = None
        self.turn_s = TURN_S
        for queue in (self._first, self._new, self._last):
            if queue:
                queue.popleft().go_on()
            while queue and self.turn_s > 0:
                queue.popleft().go_on()
        if self._first or self._new or self._last:
            self._expect_turn()


class Work:
    """Time that one connection's frames have taken. Times are in seconds, the event loop's.

    HTTP/2 lets a caller send frames that cost the server far more than the caller: requests that
    are reset at once, settings, pings. Whatever they are, the time is counted, and the connection
    is read later when it has used up its share and others are there: callers that behave notice
    nothing, and the only caller gets all.
    """

    __slots__ = ("_at_s", "_greedy", "_left_s", "share")

    def __init__(self, share: WorkShare, now_s: float) -> None:
        """Start with little time saved."""
        self.share = share
        self._left_s = _FIRST_S
        self._at_s = now_s
        self._greedy = False

    def took(self, seconds: float, begun_s: float, now_s: float) -> float:
        """Count work that was done, and work that has begun and takes about ``begun_s``.

        Return how long to read nothing from this connection, mostly 0.
        """
        rate = max(_LEAST, self.share.of_loop / max(1, self.share.greedy))
        self._left_s = min(_SAVED_S, self._left_s + (now_s - self._at_s) * rate)
        self._left_s -= min(seconds, _MOST_S) + _BEGUN_PART * begun_s
        self._at_s = now_s
        self._set_greedy(self._left_s < 0)
        if not self._greedy:
            self.share.modest_s = now_s
            return 0.0
        if now_s - self.share.modest_s > _NEIGHBOUR_S:
            self._left_s = 0.0
            return 0.0
        return -self._left_s / rate

    def close(self) -> None:
        """Count the connection no more."""
        self._set_greedy(False)  # noqa: FBT003

    def _set_greedy(self, greedy: bool) -> None:  # noqa: FBT001
        if greedy is not self._greedy:
            self._greedy = greedy
            self.share.greedy += 1 if greedy else -1
