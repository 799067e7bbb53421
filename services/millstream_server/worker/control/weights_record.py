"""Notes the last UpdateWeights from disk in a file, so that a restarted worker loads it again.

Without it a worker comes back with the weights of its start, and no worker of the pool that was
updated may share a request with it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from millstream_server.control.engine import EngineInfo
from millstream_server.control.operations import DiskWeights
from millstream_server.model_files.weights import weight_files
from millstream_server.runtime.errors import EngineFailedError, InvalidWeightsError, ServingError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.control.operations import REFUSALS
from millstream_server.worker.control.plan import ControlPlan

log = get_log(__name__)

InfoT = TypeVar("InfoT", bound=EngineInfo)

State = Mapping[str, list[int]]
"""By a file's name its size, the times of its last change and of its inode's, in nanoseconds."""


def state_of(directory: Path | None) -> State:
    """Return the state of a model's configuration and weight files, without reading them.

    Equal states mean equal content: the second time changes with every write and can't be set. It
    is empty if there is no directory.
    """
    if directory is None:
        return {}
    try:
        files = [directory / "config.json", *weight_files(directory)]
        stats = {file.name: file.stat() for file in files if file.exists()}
    except OSError:
        return {}
    return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns] for name, at in stats.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class NotedUpdate:
    """An update from disk, and what was on the disk then."""

    version: str
    path: str
    files: State
    """Of the checkpoint."""
    model_files: State
    """Of the model that the worker was started with: files that are newer count, not the update."""


_NAMES = tuple(field.name for field in fields(NotedUpdate))


class WeightsRecord:
    """A file that outlives the process. Failures to write it are logged: an update goes on."""

    def __init__(self, file: Path | None, model_path: Path | None = None) -> None:
        """Use ``file``; None: nothing is noted. ``model_path`` is the model of the start."""
        self._file = file
        self._model_path = model_path

    async def about_to_load(self, path: Path) -> State:
        """Return the state of a checkpoint, for `note`; call it before the engine reads it."""
        return await asyncio.to_thread(state_of, path) if self._file else {}

    async def note(self, version: str, path: Path, before: State) -> None:
        """Note that the engine has loaded a checkpoint, unless its files changed meanwhile."""
        if self._file is None:
            return
        model = await asyncio.to_thread(state_of, self._model_path)
        noted = NotedUpdate(version=version, path=str(path), files=before, model_files=model)
        if not before or await asyncio.to_thread(state_of, path) != before:
            log.warning("the weights' files changed while they were loaded; they aren't noted")
            await self.clear()
            return
        await asyncio.to_thread(_write, self._file, noted)

    async def clear(self) -> None:
        """Forget the update: the engine has weights that are in no file."""
        if self._file is not None:
            await asyncio.to_thread(_unlink, self._file)

    async def read(self) -> NotedUpdate | None:
        """Return the update that the worker should have; None: the weights of its start."""
        if self._file is None:
            return None
        noted = await asyncio.to_thread(_read, self._file)
        if noted and noted.model_files != await asyncio.to_thread(state_of, self._model_path):
            log.warning(
                "the model's files are newer than the last update of weights, which is forgotten",
                version=noted.version,
            )
            await self.clear()
            return None
        return noted


def _read(file: Path) -> NotedUpdate | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return NotedUpdate(**{name: found[name] for name in _NAMES})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.error("the record of the last update of weights can't be read", error=error)
        return None


def _write(file: Path, noted: NotedUpdate) -> None:
    whole = file.with_name(file.name + ".new")
    try:
        whole.write_text(json.dumps(asdict(noted)), encoding="utf-8")
        whole.replace(file)
    except OSError as error:
        log.error("the update of weights can't be noted for a restart", error=error)
        _unlink(file)


def _unlink(file: Path) -> None:
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        log.error("the record of an update of weights can't be removed", error=error)


async def restored(info: InfoT, plan: ControlPlan) -> InfoT:
    """Load the last update again into an engine that has just started; return its info.

    If its checkpoint is gone, has changed or doesn't fit, the engine keeps the weights of its
    start, under their version: routing then shares no request between them and others.

    Raises:
        ServingError: the engine failed. The next start doesn't try again.
    """
    record = WeightsRecord(plan.weights_record, plan.model_path)
    noted = await record.read()
    control = plan.controls().weights if noted else None
    if noted is None or control is None:
        return info
    log.phase("loading the weights of the last update")
    try:
        path = await plan.directories.resolve("path", noted.path)
        await _expect(path, noted)
        source = DiskWeights(path)
        await control.check_weights(source, lambda _done, _total: None)
        await control.update_weights(source, noted.version)
    except ServingError as error:
        log.error(
            "the weights of the last update aren't loaded again; update this worker",
            version=noted.version,
            reason=error.message,
        )
        await record.clear()
        if isinstance(error, REFUSALS):
            return info
        raise
    try:
        await _expect(path, noted)
    except InvalidWeightsError as error:
        await record.clear()
        raise EngineFailedError("the weights' files changed while they were loaded") from error
    log.info("the weights of the last update are loaded again", version=noted.version)
    return replace(info, weight_version=noted.version)


async def _expect(path: Path, noted: NotedUpdate) -> None:
    if not noted.files or await asyncio.to_thread(state_of, path) != noted.files:
        raise InvalidWeightsError("its files are gone, or have changed since")
