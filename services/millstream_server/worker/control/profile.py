"""StartProfile and StopProfile: each recording in a directory of its own."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from millstream_server.control.operations import ProfileActivity, ProfileControl
from millstream_server.runtime.errors import (
    OperationConflictError,
    StorageError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control.operations import Operations
from millstream_server.worker.control.supported import SupportedControls

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of a recording."""

    path: Path
    nbytes: int


class ProfileOperations:
    """Records profiles, one at a time.

    A recording that has stopped by itself counts as recorded until `stop` has named its files.
    """

    def __init__(
        self, operations: Operations, controls: SupportedControls, directory: Path
    ) -> None:
        """Record below ``directory``, which is made when it is needed."""
        self._operations = operations
        self._controls = controls
        self._directory = directory
        self._recording: Path | None = None

    @property
    def recording(self) -> bool:
        """Whether a profile is recorded, or recorded and not yet fetched."""
        return self._recording is not None

    async def start(self, activities: Collection[ProfileActivity], steps: int) -> Path:
        """Begin to record; return the directory. ``steps`` 0: until `stop`.

        Raises:
            OperationConflictError: a profile is recorded, or another operation runs.
            UnsupportedFeatureError: the engine can't, or not this activity.
            StorageError: the directory can't be made.
        """
        control: ProfileControl = self._controls.require("StartProfile", lambda c: c.profile)
        with self._operations.one("StartProfile") as operation:
            if self._recording is not None:
                raise OperationConflictError(
                    "a profile is recorded; StopProfile ends it and names its files, also those of "
                    "one that has stopped by itself"
                )
            return await operation.apply(self._start(control, activities, steps))

    async def stop(self) -> tuple[RecordedFile, ...]:
        """End the recording; return its files, by path.

        Raises:
            OperationConflictError: nothing is recorded, or another operation runs.
            UnsupportedFeatureError: the engine can't record.
        """
        control: ProfileControl = self._controls.require("StopProfile", lambda c: c.profile)
        with self._operations.one("StopProfile") as operation:
            if self._recording is None:
                raise OperationConflictError("no profile is recorded; call StartProfile first")
            return await operation.apply(self._stop(control, self._recording))

    async def _start(
        self, control: ProfileControl, activities: Collection[ProfileActivity], steps: int
    ) -> Path:
        directory = self._directory / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(directory.mkdir, mode=0o700, parents=True)
        except OSError as error:
            log.warning("a profile's directory can't be made", path=str(directory), error=error)
            raise StorageError(
                "the worker can't make a directory for the profile: check its --profile-dir"
            ) from error
        try:
            await control.start_profile(directory, activities, steps)
        except UnsupportedFeatureError:
            await asyncio.to_thread(directory.rmdir)
            raise
        self._recording = directory
        return directory

    async def _stop(self, control: ProfileControl, directory: Path) -> tuple[RecordedFile, ...]:
        await control.stop_profile()
        self._recording = None
        return await asyncio.to_thread(_files_in, directory)


def _files_in(directory: Path) -> tuple[RecordedFile, ...]:
    return tuple(
        RecordedFile(path, path.stat().st_size)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    )
