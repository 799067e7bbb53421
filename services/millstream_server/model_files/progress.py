"""How far a download is, as lines of the log."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Self

from millstream_server.runtime.telemetry.log import Log

MIB = 2**20
_SPEED_OVER = 6
"""Speeds are averages over so many lines."""


class Progress:
    """Counts files and bytes; `lines` logs them every ``period_s`` seconds."""

    def __init__(
        self,
        log: Log,
        files: int,
        size: int,
        *,
        period_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count up to ``files`` files of ``size`` bytes together."""
        self._log = log
        self._files, self._size = files, size
        self._clock = clock
        self._period_s = period_s
        self._lock = threading.Lock()
        self._complete: set[str] = set()
        self._bytes: dict[str, int] = {}
        self._seen: deque[tuple[float, int]] = deque([(clock(), 0)], maxlen=_SPEED_OVER)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        """Begin to log."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop."""
        self._stop.set()
        self._thread.join()

    def there(self, name: str, size: int) -> None:
        """Count a file that was there before; it doesn't count for the speed."""
        with self._lock:
            self._complete.add(name)
            self._bytes[name] = size
            self._seen = deque(((at, seen + size) for at, seen in self._seen), _SPEED_OVER)

    def add(self, name: str, count: int) -> None:
        """Count further bytes of a file; fewer than 0: they are lost."""
        with self._lock:
            self._bytes[name] = max(0, self._bytes.get(name, 0) + count)

    def reset(self, name: str) -> None:
        """Forget a file's bytes: it begins anew."""
        with self._lock:
            self._bytes.pop(name, None)
            self._complete.discard(name)

    def done(self, name: str, size: int) -> None:
        """Count a file as complete."""
        with self._lock:
            self._complete.add(name)
            self._bytes[name] = size

    def line(self) -> None:
        """Log how far it is."""
        with self._lock:
            now, done = self._clock(), sum(self._bytes.values())
            then, before = self._seen[0]
            self._seen.append((now, done))
            files = len(self._complete)
        speed = max(0.0, (done - before) / (now - then)) if now > then else 0.0
        self._log.info(
            "downloading",
            files=f"{files}/{self._files}",
            mib=f"{done // MIB}/{self._size // MIB}",
            percent=100 * done // self._size if self._size else 100,
            mib_per_s=round(speed / MIB, 1),
            left_s=round((self._size - done) / speed) if speed else "unknown",
        )

    def _run(self) -> None:
        while not self._stop.wait(self._period_s):
            self.line()
