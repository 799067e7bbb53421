"""Detects at once that one of SGLang's processes has ended."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable


class ProcessWatch:
    """Reports the first loss of a child process, once.

    A child's pidfd becomes readable when it ends; and SGLang's children send SIGQUIT to this
    process on an exception. SGLang's handler for SIGQUIT kills this process and all its children,
    and so does the default.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        """Prepare; ``on_loss`` is called with a sentence for the log."""
        self._on_loss = on_loss
        self._pidfds: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported = False

    def catch_sigquit(self) -> None:
        """Handle SIGQUIT; call it on the main thread's loop before SGLang starts.

        Raises:
            RuntimeError: the loop runs in another thread.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(
            signal.SIGQUIT, self._report, "a child process reported a failure (SIGQUIT)"
        )

    def watch(self, pids: Iterable[int]) -> None:
        """Also watch these processes."""
        loop = asyncio.get_running_loop()
        for pid in pids:
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                self._report(f"process {pid} was gone at once")
                return
            self._pidfds[pid] = descriptor
            loop.add_reader(descriptor, self._ended, pid)

    def _ended(self, pid: int) -> None:
        self._forget(pid)
        self._report(f"process {pid} ended")

    def _report(self, what: str) -> None:
        if not self._reported:
            self._reported = True
            self._on_loss(what)

    def _forget(self, pid: int) -> None:
        descriptor = self._pidfds.pop(pid)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)

    def stop(self) -> None:
        """Stop watching; may be called twice."""
        self._reported = True
        for pid in list(self._pidfds):
            self._forget(pid)
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None
