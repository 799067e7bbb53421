"""Recording the simulated engine's steps, in the trace format of Chrome and Perfetto."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from millstream_server.control.operations import ProfileActivity
from millstream_server.engines.simulated.rank import Rank
from millstream_server.runtime.errors import StorageError, UnsupportedFeatureError

_MOST_STEPS = 100_000
"""Steps that are kept: the last ones, about 10 MB of file."""


class SimulatedProfile:
    """Satisfies `control.operations.ProfileControl`. One file, with the steps of every rank."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        """Work on these ranks."""
        self._ranks = ranks
        self._file: Path | None = None
        self._left = 0
        self._steps: deque[dict[str, Any]] = deque(maxlen=_MOST_STEPS)
        self._writing: asyncio.Task[None] | None = None

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        """See `ProfileControl.start_profile`; ``steps`` are those of all ranks together."""
        if missing := set(activities) - {ProfileActivity.CPU}:
            names = ", ".join(sorted(activity.value for activity in missing))
            raise UnsupportedFeatureError.of(
                "activities", f"the simulated engine records cpu only, not {names}"
            )
        name = f"simulated-{time.strftime('%Y%m%dT%H%M%S')}-{secrets.token_hex(4)}.trace.json"
        self._file = directory / name
        self._left = steps
        self._steps.clear()
        self._writing = None
        for dp_rank, rank in enumerate(self._ranks):
            rank.steps.recorder = partial(self._record, dp_rank)

    async def stop_profile(self) -> None:
        """See `ProfileControl.stop_profile`.

        Raises:
            StorageError: the file couldn't be written.
        """
        self._finish()
        writing, self._writing = self._writing, None
        if writing is not None:
            await asyncio.shield(writing)

    def _record(self, dp_rank: int, began_s: float, took_s: float, requests: int) -> None:
        self._steps.append(
            {
                "name": "step",
                "ph": "X",
                "ts": began_s * 1e6,
                "dur": took_s * 1e6,
                "pid": os.getpid(),
                "tid": dp_rank,
                "args": {"requests": requests},
            }
        )
        if self._left:
            self._left -= 1
            if not self._left:
                self._finish()

    def _finish(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        for rank in self._ranks:
            rank.steps.recorder = None
        trace = {"traceEvents": list(self._steps), "displayTimeUnit": "ms"}
        self._writing = asyncio.create_task(asyncio.to_thread(_write, file, trace))


def _write(file: Path, trace: dict[str, Any]) -> None:
    try:
        file.write_text(json.dumps(trace))
    except OSError as error:
        raise StorageError(f"the trace couldn't be written: {error.strerror}") from error
