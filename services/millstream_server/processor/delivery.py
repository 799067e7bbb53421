"""The output of a generation's choices on its way to the client: as deltas, paced.

While the client reads, deltas go through an outlet, straight from where tokens arrive: the
request's task doesn't run for them. It gets, from `Delivery.deltas`, what the outlet can't send,
errors, and the last delta. Then nothing is made of further tokens until the task asks for more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from millstream_server.processor.choice import Choice, Delta
from millstream_server.processor.held_output import HeldOutput
from millstream_server.processor.pacing import PacedStream
from millstream_server.runtime.errors import Failure, ServingError

Outlet: TypeAlias = Callable[[Sequence[Delta]], bool]
"""Sends deltas to the client at once; returns False if it can't: nothing was sent."""


class Delivery:
    """Passes on the output of one generation's choices."""

    def __init__(
        self,
        choices: Sequence[Choice],
        paced: PacedStream,
        held: HeldOutput,
        on_first_token: Callable[[], None],
    ) -> None:
        """Pass on what ``choices`` make; ``on_first_token`` is called when the first token goes."""
        self.paced = paced
        self.held = held
        self.error: Failure | None = None
        """The failure that ended it."""
        self._choices = choices
        self._on_first_token = on_first_token
        self._first_token_given = False
        self._unfinished = len(choices)
        """Number of choices whose last delta was not made."""
        self._outlet: Outlet | None = None
        self._taken: list[Delta] = []
        """Deltas that the outlet could not send."""
        self._dropped = False
        """Whether there is a gap between what was returned and what still comes."""

    @property
    def complete(self) -> bool:
        """Whether the last delta of every choice has been returned, or is about to be."""
        return not self._unfinished

    def fail(self, error: Failure) -> bool:
        """End with an error, after the output so far; only the first error counts.

        Return whether it does. It doesn't once the last delta has been returned.
        """
        if self.error is not None or self.complete:
            return False
        self.error = error
        self.paced.urge()
        return True

    def drop(self, error: ServingError) -> None:
        """End with an error at once; the caller has dropped the output."""
        self._taken = []
        self._dropped = True
        self.error = error
        self.paced.urge()

    def all_given(self) -> None:
        """Note that nothing waits to be returned: the last message can't be taken back.

        Raises:
            ServingError: it was dropped before that.
        """
        if self.error is not None:
            raise self.error
        self.held.close()

    def close(self) -> None:
        """Nobody asks for output any more, and nobody is to be sent any."""
        self._outlet = None
        self.paced.close()
        self.held.close()

    def send_through(self, outlet: Outlet, payer: Hashable) -> None:
        """Offer new output to ``outlet`` while `deltas` waits.

        Output that waits to be read counts together for all requests of ``payer``.
        """
        self._outlet = outlet
        self.held.payer = payer
        self.paced.send_through(self._send)

    async def deltas(self) -> list[Delta]:
        """Wait for new output, as paced; return at most one delta per choice.

        Call it until `complete`.

        Raises:
            ServingError: a choice failed; its output before that was returned, unless so much
            gathered that it was dropped.
        """
        self.held.recount()
        while True:
            await self.paced.wait()
            if self._dropped and self.error:
                raise self.error
            fresh, self._taken = self._taken, []
            if not fresh:
                fresh = self._take()
            elif any(choice.answer.over for choice in self._choices):
                self.paced.urge()  # the end may have come meanwhile, without a token
            if self.complete:
                self.error = None  # too late: everything has been returned
            if fresh:
                self._given(fresh)
                if self.error:
                    self.paced.urge()  # raise the error at the next call
                return fresh
            if self.error:
                raise self.error

    def _send(self) -> bool:
        """Send new output through the outlet; False: `deltas` is to return."""
        if self.error or self._outlet is None:
            return False
        fresh = self._take()
        if not fresh:
            return True
        if self.complete or not self._outlet(fresh):
            self._taken = fresh
            return False
        self._given(fresh)
        return True

    def _take(self) -> list[Delta]:
        fresh = []
        for choice in self._choices:
            delta = choice.take()
            if delta is not None:
                fresh.append(delta)
                if delta.finish_reason is not None:
                    self._unfinished -= 1
        return fresh

    def _given(self, fresh: Sequence[Delta]) -> None:
        """Note what follows new output."""
        if not self._first_token_given and any(delta.token_ids for delta in fresh):
            self._first_token_given = True
            self._on_first_token()
        for choice in self._choices:
            if choice.has_more:
                self.paced.urge()  # the same message, divided: no interval in between
                return
