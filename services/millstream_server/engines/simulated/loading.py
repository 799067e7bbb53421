"""The simulated engine's loading: some files, each of which takes its share of the time."""

from __future__ import annotations

import asyncio

from millstream_server.engines.load_progress import LoadProgress, LoadStage

FILES = 10
FILE_BYTES = 1 << 30


class Loading:
    """Takes ``load_s`` seconds, and says how far it is."""

    def __init__(self, load_s: float) -> None:
        """Prepare to load."""
        self._load_s = load_s
        self._stage = LoadStage.STARTING
        self._files_done = 0

    def progress(self) -> LoadProgress:
        """Return how far it is; files and bytes are simulated, too."""
        return LoadProgress(
            stage=self._stage,
            files_done=self._files_done,
            files_total=FILES,
            bytes_done=self._files_done * FILE_BYTES,
            bytes_total=FILES * FILE_BYTES,
        )

    async def load(self) -> None:
        """Load."""
        self._stage = LoadStage.LOADING_WEIGHTS
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for file in range(1, FILES + 1):
            due_s = began_s + self._load_s * file / FILES
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._files_done = file
        self._stage = LoadStage.PREPARING
