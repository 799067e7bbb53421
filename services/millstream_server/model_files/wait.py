"""Waiting until another process has filled a directory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from millstream_server.model_files import state
from millstream_server.model_files.errors import FailedError
from millstream_server.model_files.progress import MIB
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)
_LOOK_S = 0.5


def wait(directory: Path, *, timeout_s: float, period_s: float) -> None:
    """Wait for the mark of a complete directory; log how much is there every ``period_s`` seconds.

    ``timeout_s`` bounds the time in which nothing further arrives, not the whole download.

    Raises:
        FailedError: nothing has arrived for so long.
    """
    size, since, logged = -1, time.monotonic(), 0.0
    while (complete := state.complete_in(directory)) is None:
        now, present = time.monotonic(), _present(directory)
        if present != size:
            size, since = present, now
        if now - since > timeout_s:
            raise FailedError(
                f"{directory} isn't complete, and nothing has arrived for {timeout_s:g} s "
                f"({size // MIB} MiB are there). See the log of what downloads into it"
            )
        if now - logged >= period_s:
            logged = now
            began = state.read(directory / state.PARTIAL)
            of = f"/{sum(began.files.values()) // MIB}" if began else ""
            log.info("waiting for the model's files", directory=directory, mib=f"{size // MIB}{of}")
        time.sleep(_LOOK_S)
    log.info("the model's files are there", directory=directory, uri=complete.uri)


def _present(directory: Path) -> int:
    """Add up the bytes on disk, of unfinished files too."""
    total = 0
    for folder, _, names in os.walk(directory):
        total += sum(state.size_of(Path(folder, name)) or 0 for name in names)
    return total
