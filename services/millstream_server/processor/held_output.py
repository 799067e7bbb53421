"""What a generation holds for a client that doesn't read, as counted in `UnreadOutput`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.choice import Choice


class HeldOutput:
    """One generation's share of `UnreadOutput`; satisfies `links.unread.Gathering`.

    Output that is sent as it comes is never counted: `add` is called only while it gathers.
    """

    __slots__ = ("_choices", "_closed", "_nbytes", "_on_overflow", "_unread", "payer")

    def __init__(
        self, unread: UnreadOutput, choices: Sequence[Choice], on_overflow: Callable[[], None]
    ) -> None:
        """Count what ``choices`` hold; ``on_overflow`` is called if it has to be dropped."""
        self.payer: Hashable = self
        """See `Gathering.payer`; set it before the first `add`."""
        self._unread = unread
        self._choices = choices
        self._on_overflow = on_overflow
        self._nbytes = 0
        self._closed = False

    def add(self, nbytes: int) -> None:
        """Count output that has just come."""
        if self._closed:
            self._drop()
            return
        if not self._nbytes:
            nbytes = self._held()  # also what came before it began to gather
        self._nbytes += nbytes
        self._unread.add(self, nbytes)

    def recount(self) -> None:
        """Count what is held now: output has been sent."""
        if self._nbytes:
            self._clear()
            self._nbytes = held = self._held()
            if held:
                self._unread.add(self, held)

    def close(self) -> None:
        """Count nothing any more: all was read, or nobody is to read it."""
        self._closed = True
        self._on_overflow = lambda: None  # it knows the generation, which knows this
        self._clear()

    def overflowed(self) -> None:
        """See `Gathering.overflowed`."""
        on_overflow = self._on_overflow
        self._drop()
        self.close()
        on_overflow()

    def _clear(self) -> None:
        if self._nbytes:
            nbytes, self._nbytes = self._nbytes, 0
            self._unread.remove(self, nbytes)

    def _drop(self) -> None:
        for choice in self._choices:
            choice.drop()

    def _held(self) -> int:
        return sum(choice.held_bytes for choice in self._choices)
