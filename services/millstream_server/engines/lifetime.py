"""Whether a vendor's engine runs, and the one report of its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from millstream_server.control.engine import EngineInfo
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

BuiltT = TypeVar("BuiltT")
InfoT = TypeVar("InfoT", bound=EngineInfo)
T = TypeVar("T")


class EngineLifetime(Generic[BuiltT, InfoT]):
    """What is the same from the start to the end of engines of several vendors.

    Order of calls: `started`, the others, `_end`, which is for the subclass's `close`. `started`,
    `ready` and `answer` raise EngineFailedError: the engine has not started, or has ended.
    """

    def __init__(self, vendor: str, fail_all: Callable[[str], None]) -> None:
        """``fail_all`` is called once at the end, with why: it ends what is open."""
        self.failure = ""
        """Why the engine doesn't work any more; empty: it does, or has not started."""
        self.ended = asyncio.Event()
        """Set when there is such a failure."""
        self.closed = False
        self._vendor = vendor
        self._fail_all = fail_all
        self._running: tuple[BuiltT, InfoT] | None = None
        self._on_failure: Callable[[ServingError], None] | None = None

    def started(
        self, built: BuiltT, info: InfoT, on_failure: Callable[[ServingError], None]
    ) -> None:
        """Report a later death to ``on_failure``, once."""
        if self.failure:
            raise EngineFailedError(self.failure)
        self._running, self._on_failure = (built, info), on_failure

    def ready(self) -> tuple[BuiltT, InfoT]:
        """Return the running engine, and what its worker tells its callers."""
        if self.failure:
            raise EngineFailedError(self.failure)
        if self._running is None:
            raise EngineFailedError("The engine has not started.")
        return self._running

    async def answer(self, task: asyncio.Future[T]) -> T:
        """Await what the engine answers: from one that has ended nothing comes."""
        ended = asyncio.ensure_future(self.ended.wait())
        try:
            both: set[asyncio.Future[Any]] = {task, ended}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if not task.done():
            task.cancel()
            raise EngineFailedError(self.failure)
        return task.result()

    def lose(self, what: str) -> None:
        """Fail everything: a part of the engine is gone, or unfit to go on."""
        if self.closed or self.failure:
            return
        log.error("the engine is lost", engine=self._vendor, reason=what)
        self._fail("The engine behind this worker died.")
        if self._on_failure is not None:
            self._on_failure(EngineFailedError(self.failure))

    def _end(self) -> bool:
        """Fail what is open, as the engine is closed; return False the second time."""
        if self.closed:
            return False
        self.closed = True
        self._fail("The worker's engine was closed.")
        return True

    def _fail(self, message: str) -> None:
        self.failure = message
        self.ended.set()
        self._fail_all(message)
