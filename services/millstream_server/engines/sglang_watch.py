"""Noticing at once that one of SGLang's processes died, and surviving it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterable


class ProcessWatch:
    """Reports the first sign that a child is lost, once.

    Two signs: the child's pidfd becomes readable when it ends, and SIGQUIT, which SGLang's
    children send to this process when they hit an exception. SGLang's own handler for it kills
    this process with all its children; Python's default does too.
    """

    def __init__(self, on_loss: Callable[[str], None]) -> None:
        """Watch nothing yet; ``on_loss`` gets a sentence for the log."""
        self._on_loss = on_loss
        self._pidfds: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reported = False

    def catch_sigquit(self) -> None:
        """Take SIGQUIT; to be called on the main thread's loop before SGLang starts.

        Raises:
            RuntimeError: the loop runs in another thread.
        """
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(
            signal.SIGQUIT, self._report, "a child process reported a failure (SIGQUIT)"
        )

    def watch(self, pids: Iterable[int]) -> None:
        """Watch these processes too."""
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
        """Watch nothing any more; may be called twice."""
        self._reported = True
        for pid in list(self._pidfds):
            self._forget(pid)
        if self._loop is not None:
            self._loop.remove_signal_handler(signal.SIGQUIT)
            self._loop = None
