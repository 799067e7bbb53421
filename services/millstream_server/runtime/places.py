"""A request's place before something with limited room (`runtime.admission`)."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable
from dataclasses import dataclass

from millstream_server.runtime.errors import DeadlinePassedError, ServingError


class Priority(enum.IntEnum):
    """Higher goes first."""

    LOW = 0
    NORMAL = 1
    HIGH = 2


class State(enum.Enum):
    """In this order; a place may skip any but the last."""

    WAITS = enum.auto()
    RUNS = enum.auto()
    LEFT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a request takes."""

    units: int = 1
    tokens: int = 0
    priority: Priority = Priority.NORMAL
    timeout_s: float | None = None
    """Time left until the caller's deadline."""


class Place:
    """One request's place: it waits or runs, until it leaves.

    Whoever got it from `AdmissionQueue.enter` calls `leave` in the end, whatever happened; a second
    time does nothing. If it `waits`, await `ready` once.
    """

    __slots__ = ("_decided", "_error", "_leave", "ask", "number", "since_s", "state", "waited_s")

    def __init__(self, ask: Ask, number: int, now_s: float, leave: Callable[[Place], None]) -> None:
        """Made by `AdmissionQueue.enter`; ``number`` is the order of arrival."""
        self.ask = ask
        self.number = number
        self.state = State.WAITS
        self.since_s = now_s
        """When it came into this state."""
        self.waited_s = 0.0
        self._leave = leave
        self._decided: asyncio.Future[None] | None = None
        self._error: ServingError | None = None

    @property
    def waits(self) -> bool:
        """Whether it is in the queue."""
        return self.state is State.WAITS

    @property
    def runs(self) -> bool:
        """Whether it was let through and hasn't left."""
        return self.state is State.RUNS

    async def ready(self) -> None:
        """Wait until it `runs`, or was cancelled.

        Raises:
            ServingError: it was displaced, no worker came back, or what `fail` was called with.
            DeadlinePassedError: the caller's time ran out.
        """
        if self.waits:
            self._decided = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(self.ask.timeout_s):
                    await self._decided
            except TimeoutError:
                self.leave()
                raise DeadlinePassedError(
                    "the deadline passed while the request waited to run"
                ) from None
        if self._error:
            raise self._error

    def cancel(self) -> None:
        """Take it out of the queue; does nothing once it runs."""
        if self.waits:
            self.leave()

    def fail(self, error: ServingError) -> None:
        """Take it out of the queue with an error; does nothing once it runs."""
        if self.waits:
            self._error = error
            self.leave()

    def leave(self) -> None:
        """Give the room back, or stop waiting for it."""
        self._leave(self)

    def turn(self, state: State, now_s: float) -> float:
        """For the queue: change state; answers how long the one before lasted."""
        lasted_s, self.since_s = now_s - self.since_s, now_s
        self.state = state
        if self._decided and not self._decided.done():
            self._decided.set_result(None)
        return lasted_s
