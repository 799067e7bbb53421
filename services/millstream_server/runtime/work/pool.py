"""The threads that read what callers send, where that takes long: bodies, texts, grammars."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from millstream_server.runtime.memory import trim_in_background
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.work.fair_queue import FairQueue, PoolLimits, Work

T = TypeVar("T")

_MUCH_S = 0.25
"""Work of more seconds leaves its memory in the heaps: a large text that can't be cut takes 700 MB,
in small blocks, and 400 MB of them would stay."""

CURRENT_KEY: ContextVar[str] = ContextVar("millstream_caller_key", default="")
"""`Call.caller_key` of the RPC that this task serves; empty outside of RPCs."""
_current = threading.local()


class WorkStoppedError(Exception):
    """The caller has left, so the work was given up; nobody sees it."""


def stop_if_gone() -> None:
    """Give the work up if its caller has left. Long work calls it between its parts.

    Raises:
        WorkStoppedError: it has.
    """
    work: Work | None = getattr(_current, "work", None)
    if work is not None and work.gone:
        raise WorkStoppedError


class WorkPool:
    """Runs work off the event loop, in the order of a `FairQueue`.

    The threads are daemons: the interpreter's exit doesn't wait for them.
    """

    def __init__(self, limits: PoolLimits) -> None:
        self._limits = limits
        self._queue = FairQueue(limits)
        self._changed = threading.Condition()
        self._started = False
        self._closed = False
        self._idle = 0
        """Threads that wait for work."""

    @property
    def waiting_s(self) -> float:
        """Seconds of work that wait, by estimate."""
        return self._queue.waiting_s

    async def run(self, work: Callable[[], T], seconds: float, *, batch: bool = False) -> T:
        """Run one piece of work, estimated to take so many ``seconds``.

        If this is cancelled, work that waits is not done, and work that runs is stopped where it
        calls `stop_if_gone`. ``batch`` is work that lets all other go first.

        Raises:
            OverloadedError: too much work waits.
        """
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        queued = Work(
            run=partial(_run, work, loop, result),
            refuse=partial(_settle, result, None),  # from this loop's `run`
            seconds=seconds,
            caller=CURRENT_KEY.get(),
            batch=batch,
        )
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool takes no more work")
            self._queue.add(queued)
            self._start()
            self._changed.notify()
        metrics.TEXT_WAITING.set(self.waiting_s)
        try:
            return await result
        except asyncio.CancelledError:
            with self._changed:
                self._queue.remove(queued)
            raise
        finally:
            metrics.TEXT_WAITING.set(self.waiting_s)
            del result, queued  # they hold the error, whose traceback holds this frame

    async def in_turns(self, pieces: Iterable[tuple[Callable[[], T], float]]) -> list[T]:
        """Run a batch's pieces one after another, each with its estimate in seconds.

        Others' work may run in between.
        """
        return [await self.run(piece, seconds, batch=True) for piece, seconds in pieces]

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _start(self) -> None:
        if not self._started:
            self._started = True
            for index in range(self._limits.threads):
                threading.Thread(target=self._serve, name=f"work-{index}", daemon=True).start()

    def _serve(self) -> None:
        while True:
            work = self._next()
            if work is None:
                return
            started_s = time.thread_time()
            _current.work = work
            work.run()
            _current.work = None
            used_s = time.thread_time() - started_s
            with self._changed:
                self._queue.done(work, used_s)
                trim = work.seconds > _MUCH_S and not self._queue.waiting_s
            del work  # its texts may be large
            if trim:
                trim_in_background()

    def _next(self) -> Work | None:
        """Wait for work; None: this is closed."""
        with self._changed:
            while not self._closed:
                work = self._queue.take()
                if work is not None:
                    if self._idle and self._queue.waiting_s:
                        self._changed.notify()  # it may be another thread's turn too
                    return work
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
        return None


def _run(work: Callable[[], T], loop: asyncio.AbstractEventLoop, result: asyncio.Future[T]) -> None:
    value: Any = None
    error: BaseException | None = None
    try:
        value = work()
    except BaseException as raised:  # noqa: BLE001 - for whoever waits
        error = raised
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
        loop.call_soon_threadsafe(_settle, result, value, error)
    # The error's traceback holds this frame: texts of megabytes would stay until a collection.
    del work, result, value, error


def _settle(result: asyncio.Future[T], value: Any, error: BaseException | None) -> None:
    if result.done():
        return
    if error is None:
        result.set_result(value)
    else:
        result.set_exception(error)
