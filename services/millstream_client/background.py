"""The event loop of all synchronous clients of a process, in one daemon thread.

One loop for all, because gRPC passes a process's events to any of its loops: each further loop adds
changes of threads. The thread starts with the first call and ends when the last client that made a
call is closed.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from millstream_client.connection import Connection
from millstream_client.request import client_closed

if TYPE_CHECKING:
    from millstream_client.streams import MessageStream
    from millstream_client.tool_run import ToolRun

T = TypeVar("T")

_lock = threading.RLock()  # a signal handler may close a client during a call in the same thread
_END_S = 2.0
"""Longest wait for tasks and the thread at the end, which takes milliseconds."""


class Background:
    """Runs the coroutines of one client in the background; any thread may call it."""

    def __init__(self, connection: Connection) -> None:
        """Prepare; the thread starts with the first call."""
        self._connection = connection
        self._thread: _LoopThread | None = None
        self._closed = False
        self.leaving: set[asyncio.Task[None]] = set()
        """Tasks that end streams which were not read to the end."""

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine's result; an exception here, such as Ctrl-C's, cancels it.

        Raises:
            RequestCancelledError: the client was closed.
            RuntimeError: the process was forked, or this is the background thread.
        """
        future = self.submit(coroutine)
        try:
            if self._thread is not None and self._thread.is_current():
                raise RuntimeError("a SyncClient can't wait in its own background thread")
            return future.result()
        except concurrent.futures.CancelledError:
            raise client_closed() from None
        finally:
            future.cancel()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine; coroutines of one caller start in order.

        Raises:
            RequestCancelledError: the client was closed.
            RuntimeError: the process was forked.
        """
        with _lock, contextlib.ExitStack() as unless_started:
            unless_started.callback(coroutine.close)
            if self._closed:
                raise client_closed()
            if self._thread is None:
                self._thread = _LoopThread.join()
            self._thread.check_process()
            unless_started.pop_all()
            return asyncio.run_coroutine_threadsafe(coroutine, self._thread.loop)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function in the loop; in this thread before the first call, never after `close`.

        Takes no lock, since finalizers call it.
        """
        if self._thread is not None:
            self._thread.call(function)
        elif not self._closed:
            function()

    def leave(
        self, stream: MessageStream[Any] | ToolRun, reading: concurrent.futures.Future[None]
    ) -> None:
        """End a stream, in the loop, while it may still be read."""

        async def leave() -> None:
            stream.cancel()
            await asyncio.wait({asyncio.wrap_future(reading)})
            await stream.aclose()

        keep(leave(), self.leaving)

    def close(self) -> None:
        """Close the client; waiting calls get a RequestCancelledError."""
        if sys.is_finalizing():
            return  # at the interpreter's exit: threads have stopped, maybe with the lock held
        with _lock:
            thread, self._thread, self._closed = self._thread, None, True
            if thread is None or not thread.is_of_this_process():
                self._connection.end_requests()
                return
            future = asyncio.run_coroutine_threadsafe(_close(self._connection, thread), thread.loop)
        if not thread.is_current():
            future.result()
            thread.join_if_last()

    def __del__(self) -> None:
        connection, thread = self._connection, self._thread
        if thread is not None:
            thread.call(lambda: keep(_close(connection, thread), thread.closing))


def keep(coroutine: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
    """Start a coroutine and keep a reference to its task until it is done: the loop has none."""
    task = asyncio.get_running_loop().create_task(coroutine)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _close(connection: Connection, thread: _LoopThread) -> None:
    try:
        await connection.close()
    finally:
        thread.leave()


class _LoopThread:
    """The thread, while it has users, and its loop."""

    running: ClassVar[_LoopThread | None] = None
    _latest: ClassVar[threading.Thread | None] = None
    _loops: ClassVar[dict[int, asyncio.AbstractEventLoop]] = {}
    """The loop of this process; others were inherited by a fork. It is closed at the exit only:
    gRPC may still have an event for it, which on a closed loop fails in whichever loop hands it on.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        if self._process not in self._loops:
            self._loops[self._process] = asyncio.new_event_loop()
        self.loop = self._loops[self._process]
        self.closing: set[asyncio.Task[None]] = set()
        self._users = 0
        self._last_left = asyncio.Event()
        self._thread = threading.Thread(
            target=self._main, args=(self._latest,), name="millstream-client", daemon=True
        )
        self._thread.start()
        _LoopThread._latest = self._thread

    @classmethod
    def join(cls) -> _LoopThread:
        """Return the running thread, or start one, and add a user. The lock must be held."""
        if cls.running is None:
            cls.running = cls()
        cls.running.check_process()
        cls.running.add_user()
        return cls.running

    def add_user(self) -> None:
        self._users += 1

    def leave(self) -> None:
        """Remove a user, in the loop; the last one ends the thread."""
        with _lock:
            self._users -= 1
            if not self._users:
                _LoopThread.running = None
                self._last_left.set()

    def join_if_last(self) -> None:
        """Wait for the thread's end if it has no more users."""
        if self._last_left.is_set():
            self._thread.join(_END_S)

    def is_current(self) -> bool:
        """Return whether the calling thread runs the loop.

        Until the thread before has ended, it runs the coroutines of new clients too.
        """
        with contextlib.suppress(RuntimeError):  # this thread runs no loop
            return asyncio.get_running_loop() is self.loop
        return False

    def is_of_this_process(self) -> bool:
        """Return whether this process started it: a forked process doesn't have the thread."""
        return os.getpid() == self._process

    def check_process(self) -> None:
        if not self.is_of_this_process():
            raise RuntimeError(
                "this process was forked while a SyncClient was in use, which gRPC doesn't survive:"
                " use SyncClient only after forking, or start processes with spawn"
            )

    def call(self, function: Callable[[], object]) -> None:
        if self.is_of_this_process():
            with contextlib.suppress(RuntimeError):  # at the exit the loop is closed
                self.loop.call_soon_threadsafe(function)

    def _main(self, previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()  # it may still be ending
        self.loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        await self._last_left.wait()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        if rest:  # calls of closed clients, about to raise
            _, late = await asyncio.wait(rest, timeout=_END_S)
            for task in late:
                task.cancel()

    @classmethod
    def close_loop(cls) -> None:
        """Close the loop at the exit, unless it still runs."""
        loop = cls._loops.get(os.getpid())
        if loop is not None and not loop.is_running():
            loop.close()


atexit.register(_LoopThread.close_loop)
