"""Threads for code that blocks and may hang: they don't hold up the end of the process."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonThreads:
    """A fixed number of daemon threads, which run calls in their order.

    Unlike with an executor of `concurrent.futures`, the interpreter's exit doesn't wait for them.
    """

    def __init__(self, count: int, name: str) -> None:
        """Start the threads with the first call."""
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True)
            for index in range(count)
        ]
        self._lock = threading.Lock()
        self._started = False
        self._closed = False

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Call it in a thread; a call whose future is cancelled before its turn is not made.

        Raises:
            RuntimeError: `close` was called.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the threads take no more calls")
            if not self._started:
                self._started = True
                for thread in self._threads:
                    thread.start()
            self._calls.put(partial(_settle, future, call, *args))
        return future

    def close(self) -> None:
        """Take no more calls; those that are there still run. Don't wait for them."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for _ in self._threads:
                    self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # its arguments and its result may be large


def _settle(future: Future[T], call: Callable[..., T], *args: Any) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*args)
    except BaseException as error:  # noqa: BLE001 - for whoever waits
        future.set_exception(error)
    else:
        future.set_result(result)
