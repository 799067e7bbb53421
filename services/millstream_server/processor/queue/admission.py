"""One request's admission: it waits, runs, and releases its capacity."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.runtime.errors import DeadlinePassedError, Failure
from millstream_server.runtime.priority import Priority


class State(enum.Enum):
    """States in this order; an admission may skip any but the last."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    LEFT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRequest:
    """The capacity that a request needs."""

    units: int = 1
    tokens: int = 0
    priority: Priority = Priority.NORMAL
    timeout_s: float | None = None
    """Seconds until the caller's deadline."""


class Admission:
    """One request's admission: it waits or runs, until `leave`.

    The caller of `AdmissionQueue.enter` must call `leave` at the end in every case; a second call
    has no effect. If it `waits`, await `admitted` once.
    """

    __slots__ = (
        "_decided",
        "_error",
        "_leave",
        "number",
        "request",
        "since_s",
        "state",
        "waited_s",
    )

    def __init__(
        self,
        request: AdmissionRequest,
        number: int,
        now_s: float,
        leave: Callable[[Admission], None],
    ) -> None:
        """Use `AdmissionQueue.enter` to make one; ``number`` is the order of arrival."""
        self.request = request
        self.number = number
        self.state = State.WAITING
        self.since_s = now_s
        """When it entered the current state."""
        self.waited_s = 0.0
        self._leave = leave
        self._decided: asyncio.Future[None] | None = None
        self._error: Failure | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state is State.WAITING

    @property
    def runs(self) -> bool:
        """Whether it was admitted and `leave` wasn't called."""
        return self.state is State.RUNNING

    async def admitted(self) -> None:
        """Wait until it `runs` or was cancelled.

        Raises:
            ServingError: it was displaced, no worker reconnected, or the error given to `fail`.
            DeadlinePassedError: the caller's deadline passed.
        """
        if self.waits:
            self._decided = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self.request.timeout_s):
                    await self._decided
            except TimeoutError:
                self.leave()
                raise DeadlinePassedError(
                    "the deadline passed while the request waited to run"
                ) from None
        if self._error:
            raise self._error

    def cancel(self) -> None:
        """Remove it from the queue; no effect once it runs."""
        if self.waits:
            self.leave()

    def fail(self, error: Failure) -> None:
        """Remove it from the queue with an error; no effect once it runs."""
        if self.waits:
            self._error = error
            self.leave()

    def leave(self) -> None:
        """Release its capacity, or stop waiting."""
        if self.state is not State.LEFT:
            self._leave(self)

    def change(self, state: State, now_s: float) -> float:
        """Set the state; return how long the one before lasted, in seconds. For the queue only."""
        lasted_s, self.since_s = now_s - self.since_s, now_s
        self.state = state
        if self._decided and not self._decided.done():
            self._decided.set_result(None)
        return lasted_s
