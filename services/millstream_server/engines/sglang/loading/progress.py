"""The progress of loading a model, from what SGLang's scheduler processes do with its files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from millstream_server.engines.base import LoadProgress, LoadStage
from millstream_server.engines.sglang.loading.open_files import bytes_read, descendants
from millstream_server.model_files.weights import weight_files

_LOOKED_AT = 2
"""Processes looked at in one call, until the one is found that reads weights."""
_QUIET_CALLS = 2
"""Calls without any open file of weights after which all is taken as read."""


class WeightsProgress:
    """Watches one process that reads weights; with several schedulers, they read side by side.

    A file is done when it was seen open and no longer is. Files that come and go between two calls
    are counted at the end.
    """

    def __init__(self, model_path: Path) -> None:
        """Look at no process yet."""
        self._model_path = model_path
        self._sizes: dict[str, int] | None = None
        """By the path as the kernel has it."""
        self._process: int | None = None
        self._seen: set[str] = set()
        self._quiet = 0
        self._over = False
        self._start = 0

    def all_read(self) -> None:
        """Say that the model is loaded."""
        self._over = True

    def look(self) -> LoadProgress:
        """Return how far it is; takes about a millisecond."""
        if self._sizes is None:
            self._sizes = _sizes(self._model_path)
        read = {} if self._over else self._read(self._sizes)
        self._note(read)
        if not self._seen and not self._over:
            return self._progress(LoadStage.STARTING, 0, 0)
        if self._over:
            return self._progress(LoadStage.PREPARING, len(self._sizes), sum(self._sizes.values()))
        done = self._seen - read.keys()
        bytes_done = sum(self._sizes[name] for name in done)
        bytes_done += sum(min(count, self._sizes[name]) for name, count in read.items())
        return self._progress(LoadStage.LOADING_WEIGHTS, len(done), bytes_done)

    def _progress(self, stage: LoadStage, files: int, count: int) -> LoadProgress:
        sizes = self._sizes or {}
        return LoadProgress(
            stage=stage,
            files_done=files,
            files_total=len(sizes),
            bytes_done=count,
            bytes_total=sum(sizes.values()),
        )

    def _note(self, read: dict[str, int]) -> None:
        self._seen |= read.keys()
        self._quiet = 0 if read or not self._seen else self._quiet + 1
        if self._quiet >= _QUIET_CALLS:
            self._over = True

    def _read(self, files: dict[str, int]) -> dict[str, int]:
        if self._process is not None:
            return bytes_read(self._process, files)
        processes = list(descendants(os.getpid()))
        if not processes:
            return {}
        # Another part of them in each call, so that a call stays short.
        self._start %= len(processes)
        for pid in itertools.islice(
            itertools.cycle(processes), self._start, self._start + min(_LOOKED_AT, len(processes))
        ):
            if found := bytes_read(pid, files):
                self._process = pid
                return found
        self._start += _LOOKED_AT
        return {}


def _sizes(model_path: Path) -> dict[str, int]:
    try:
        return {str(file.resolve()): file.stat().st_size for file in weight_files(model_path)}
    except OSError:
        return {}
