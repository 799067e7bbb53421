"""The worker's end of the pipes to SGLang's scheduler processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe

from millstream_server.engines.sglang.diffusion.child import StepReport, Stop


class Channel:
    """One pipe to each rank; the first rank's brings the reports.

    The pipes end with the processes: replaced ones get a new channel.
    """

    def __init__(
        self,
        ranks: int,
        loop: asyncio.AbstractEventLoop,
        on_report: Callable[[StepReport], None],
    ) -> None:
        """Open the pipes; ``on_report`` is called on ``loop``."""
        pairs = [Pipe() for _ in range(ranks)]
        self._ours: list[Connection] = [ours for ours, _ in pairs]
        self.theirs: list[Connection] = [theirs for _, theirs in pairs]
        """The scheduler processes' ends, in the order of their ranks."""
        self._loop = loop
        self._on_report = on_report
        self._thread = threading.Thread(target=self._read, name="sglang-steps", daemon=True)

    def listen(self) -> None:
        """Receive reports; to be called once the processes have their ends."""
        self._close_theirs()
        self._thread.start()

    def _close_theirs(self) -> None:
        for connection in self.theirs:
            connection.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                report = self._ours[0].recv()
                try:
                    self._loop.call_soon_threadsafe(self._on_report, report)
                except RuntimeError:  # the loop is closed
                    return

    def stop(self, stop: Stop) -> None:
        """End a request. It never blocks: a message is small, and there is one per request."""
        for connection in self._ours:
            with contextlib.suppress(BrokenPipeError, ConnectionError):  # the process has ended
                connection.send(stop)

    def close(self) -> None:
        """Close the pipes; the processes have ended, or never got theirs."""
        self._close_theirs()
        if self._thread.ident is not None:
            self._thread.join()
        for connection in self._ours:
            connection.close()
