"""LoadLora, UnloadLora, ListLoras, StartProfile and StopProfile: requests go on meanwhile.

An engine may load an adapter by itself when a request names one that was unloaded; the worker's own
list says which names requests may use. Each recording of a profile has a directory of its own.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millstream_server.control.operations import (
    AdapterControl,
    LoraAdapter,
    ProfileActivity,
    ProfileControl,
)
from millstream_server.runtime.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidRequestError,
    OperationConflictError,
    StorageError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control.operations import OperationKind
from millstream_server.worker.control.plan import AllowedDirectories
from millstream_server.worker.host import WorkerHost

log = get_log(__name__)

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(slots=True, eq=False)
class AdapterOperations(OperationKind):
    """Loads and unloads adapters while requests run.

    The info of ``host`` has the loaded ones, by name: requests are checked against it at once.
    """

    host: WorkerHost[Any]
    directories: AllowedDirectories

    def listed(self) -> tuple[LoraAdapter, ...]:
        """Return the loaded adapters, by name."""
        self.controls.require("ListLoras", lambda c: c.adapters)
        return self._loaded

    async def load(self, name: str, path: str) -> LoraAdapter:
        """Load an adapter.

        Raises:
            InvalidRequestError: the name or the path isn't allowed.
            AdapterExistsError: an adapter of that name is loaded.
            InvalidWeightsError: the files aren't an adapter for this model.
            OperationConflictError: another operation runs, or memory is released.
        """
        control: AdapterControl = self.controls.require("LoadLora", lambda c: c.adapters)
        with self.operations.one("LoadLora") as operation:
            _check_name(name)
            if self._find(name) is not None:
                raise AdapterExistsError(
                    f"a LoRA adapter {name} is loaded; unload it first or give another name"
                )
            self.stop.check_has_memory()
            found = await self.directories.resolve("path", path)
            return await operation.apply(self._load(control.load_adapter(name, found)))

    async def unload(self, name: str) -> None:
        """Remove an adapter: no new requests may name it, then the running ones end.

        Raises:
            AdapterNotFoundError: it isn't loaded.
        """
        control: AdapterControl = self.controls.require("UnloadLora", lambda c: c.adapters)
        with self.operations.one("UnloadLora") as operation:
            _check_name(name)
            adapter = self._find(name)
            if adapter is None:
                raise AdapterNotFoundError(f"no LoRA adapter {name} is loaded on this worker")
            await operation.apply(self._unload(control, adapter))

    async def _load(self, loading: Coroutine[Any, Any, LoraAdapter]) -> LoraAdapter:
        adapter = await loading
        self._add(adapter)
        return adapter

    async def _unload(self, control: AdapterControl, adapter: LoraAdapter) -> None:
        self.host.change_info(adapters=tuple(a for a in self._loaded if a.name != adapter.name))
        try:
            await control.unload_adapter(adapter.name)
        except BaseException:
            self._add(adapter)  # it is still there, and can be unloaded again
            raise

    @property
    def _loaded(self) -> tuple[LoraAdapter, ...]:
        loaded: tuple[LoraAdapter, ...] = self.host.loaded().adapters
        return loaded

    def _add(self, adapter: LoraAdapter) -> None:
        every = sorted((*self._loaded, adapter), key=lambda a: a.name)
        self.host.change_info(adapters=tuple(every))

    def _find(self, name: str) -> LoraAdapter | None:
        return next((a for a in self._loaded if a.name == name), None)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError.of(
            "name", "must have 1 to 128 characters: letters, digits and ._- only"
        )


@dataclass(slots=True, eq=False)
class ProfileOperations(OperationKind):
    """Records profiles, one at a time, below ``directory``, which is made when it is needed.

    A recording that has stopped by itself counts as recorded until `end` has named its files.
    """

    directory: Path
    _recording: Path | None = None

    @property
    def recording(self) -> bool:
        """Whether a profile is recorded, or recorded and not yet fetched."""
        return self._recording is not None

    async def begin(self, activities: Collection[ProfileActivity], steps: int) -> Path:
        """Begin to record; return the directory. ``steps`` 0: until `end`.

        Raises:
            OperationConflictError: a profile is recorded, or another operation runs.
            UnsupportedFeatureError: the engine can't, or not this activity.
            StorageError: the directory can't be made.
        """
        control: ProfileControl = self.controls.require("StartProfile", lambda c: c.profile)
        with self.operations.one("StartProfile") as operation:
            if self._recording is not None:
                raise OperationConflictError(
                    "a profile is recorded; StopProfile ends it and names its files, also those of "
                    "one that has stopped by itself"
                )
            return await operation.apply(self._start(control, activities, steps))

    async def end(self) -> tuple[tuple[Path, int], ...]:
        """End the recording; return its files and their bytes, by path.

        Raises:
            OperationConflictError: nothing is recorded, or another operation runs.
        """
        control: ProfileControl = self.controls.require("StopProfile", lambda c: c.profile)
        with self.operations.one("StopProfile") as operation:
            if self._recording is None:
                raise OperationConflictError("no profile is recorded; call StartProfile first")
            return await operation.apply(self._stop(control, self._recording))

    async def _start(
        self, control: ProfileControl, activities: Collection[ProfileActivity], steps: int
    ) -> Path:
        directory = self.directory / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
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

    async def _stop(self, control: ProfileControl, directory: Path) -> tuple[tuple[Path, int], ...]:
        await control.stop_profile()
        self._recording = None
        return await asyncio.to_thread(_files_in, directory)


def _files_in(directory: Path) -> tuple[tuple[Path, int], ...]:
    return tuple(
        (path, path.stat().st_size) for path in sorted(directory.rglob("*")) if path.is_file()
    )
