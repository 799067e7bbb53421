"""What operators can do with a simulated engine; the README has a table."""

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

from millstream_server.control.engine import Role
from millstream_server.control.operations import (
    DiskWeights,
    EngineControls,
    LoraAdapter,
    MemoryTag,
    MemoryUse,
    PauseMode,
    ProfileActivity,
    Progress,
    TensorWeights,
    WeightSource,
)
from millstream_server.engines.gate import Hold
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState
from millstream_server.model_files.weights import BadSafetensorsError, read_header
from millstream_server.runtime.errors import (
    EngineBusyError,
    InvalidWeightsError,
    StorageError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from millstream_server.runtime.telemetry.counts import resident_bytes

TENSOR = "simulated.weight"
"""The model's only tensor, of the shape [1]."""


class SimulatedControls:
    """Satisfies all Protocols of `control.operations` but `ProfileControl`; see the README.

    No request leaves the queue while it is paused. A prefill or transfer that is under way goes on
    until its result is there.
    """

    def __init__(self, config: SimulatedConfig, state: EngineState, ranks: Sequence[Rank]) -> None:
        self._config = config
        self._state = state
        self._ranks = ranks

    def offered(self) -> EngineControls:
        """Return an engine's operations; a diffusion language model takes no adapters."""
        adapters = None if self._config.role is Role.DIFFUSION else self
        profile = SimulatedProfile(self._ranks)
        return EngineControls(
            memory=self, pause=self, cache=self, weights=self, profile=profile, adapters=adapters
        )

    def _require_idle(self, what: str) -> None:
        if count := sum(rank.open_requests for rank in self._ranks):
            raise EngineBusyError(f"{what} while {count} requests are open")

    # ---- weights ----

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        if isinstance(source, DiskWeights):
            files = await asyncio.to_thread(_files, source.path, self._config.vocab_size)
            total = sum(size for _, size in files)
            done = 0
            for file, size in files:
                await asyncio.to_thread(check_file, file)
                done += size
                progress(done, total)
        elif isinstance(source, TensorWeights):
            _check_tensors(source)
            total = sum(len(data) for _, data in source.tensors)
            progress(total, total)
        else:
            raise UnsupportedFeatureError.of(
                "start.source", "the simulated engine takes weights from disk or in the call"
            )

    async def update_weights(self, source: WeightSource, version: str) -> None:
        await self.check_weights(source, lambda _done, _total: None)
        self._require_idle("weights can't be replaced")
        self._state.weight_version = version
        self._clear_caches()

    # ---- adapters ----

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        rank = await asyncio.to_thread(_rank, path)
        adapter = self._state.adapters[name] = LoraAdapter(name, rank, path)
        return adapter

    async def unload_adapter(self, name: str) -> None:
        """Its KV is dropped: the name may come again."""
        self._state.adapters.pop(name, None)
        while any(rank.uses_adapter(name) for rank in self._ranks):
            self._state.request_ended.clear()
            await self._state.request_ended.wait()
        for rank in self._ranks:
            rank.cache.forget_adapter(name)

    # ---- memory and caches ----

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        self._require_idle("memory can't be released")
        self._state.released |= set(tags)
        if MemoryTag.KV_CACHE in tags:
            self._clear_caches()

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        self._state.released -= set(tags)

    async def memory_use(self) -> MemoryUse:
        """Measure this process: the engine runs in it."""
        return MemoryUse(host_bytes=resident_bytes())

    async def flush_cache(self) -> None:
        self._require_idle("the cache can't be emptied")
        self._clear_caches()

    def _clear_caches(self) -> None:
        for rank in self._ranks:
            rank.cache.clear()

    # ---- a pause ----

    async def pause(self, mode: PauseMode) -> None:
        # KV that is being transferred can't be computed again by one of the two alone.
        if mode is PauseMode.RETRACT and self._config.role.hands_off:
            raise UnsupportedFeatureError.of(
                "mode",
                f"a {self._config.role.value} worker can't retract requests of a hand-off; "
                "use IN_PLACE or ABORT",
            )
        for rank in self._ranks:
            rank.gate.close(Hold.PAUSED)
            if mode is PauseMode.RETRACT:
                rank.retract()
            elif mode is PauseMode.ABORT:
                rank.fail_all(
                    lambda: WorkerPausedError("an operator paused the worker", retry_delay_s=1.0)
                )

    async def go_on(self) -> None:
        for rank in self._ranks:
            rank.go_on()


def _files(directory: Path, vocab_size: int) -> list[tuple[Path, int]]:
    """Check a checkpoint's configuration; return its files of weights and their sizes."""
    config = read_json(directory, "config.json")
    text = config.get("text_config")
    found = (text if isinstance(text, dict) else config).get("vocab_size", vocab_size)
    if found != vocab_size:
        raise InvalidWeightsError(
            f"config.json has a vocabulary of {found} tokens, the engine's has {vocab_size}"
        )
    files = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    if (directory / "model.safetensors.index.json").exists():
        named = read_json(directory, "model.safetensors.index.json").get("weight_map")
        wanted = set(named.values()) if isinstance(named, dict) else set()
        if missing := sorted(wanted - files.keys()):
            raise InvalidWeightsError(
                f"{len(missing)} of the {len(wanted)} files that model.safetensors.index.json "
                f"names are missing: {', '.join(missing[:3])}"
            )
    if not files:
        raise InvalidWeightsError("the directory has no *.safetensors files")
    return [(file, file.stat().st_size) for file in files.values()]


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read an object from a file in a directory of weights.

    Raises:
        InvalidWeightsError: the directory or the file is missing, or it has no object.
    """
    if not directory.is_dir():
        raise InvalidWeightsError("there is no such directory on the worker")
    try:
        found = json.loads((directory / name).read_bytes())
    except FileNotFoundError as error:
        raise InvalidWeightsError(f"the directory has no {name}") from error
    except OSError as error:
        raise InvalidWeightsError(f"{name} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise InvalidWeightsError(f"{name} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise InvalidWeightsError(f"{name} is no JSON object")
    return found


def check_file(file: Path) -> None:
    """Check that a safetensors file is complete.

    Raises:
        InvalidWeightsError: it isn't.
    """
    try:
        read_header(file)
    except BadSafetensorsError as error:
        raise InvalidWeightsError(str(error).replace(str(file), file.name)) from error


def _check_tensors(source: TensorWeights) -> None:
    if not source.tensors:
        raise InvalidWeightsError("no tensor was sent")
    for tensor, data in source.tensors:
        if tensor.name != TENSOR:
            raise InvalidWeightsError(f"the model has no tensor {tensor.name!r}, only {TENSOR!r}")
        if tensor.spec.shape != (1,):
            shape = list(tensor.spec.shape)
            raise InvalidWeightsError(f"{TENSOR!r} has the shape {shape}; the model's is [1]")
        if len(data) != tensor.spec.nbytes:
            raise InvalidWeightsError(
                f"{TENSOR!r} has {len(data)} bytes; its shape and type take {tensor.spec.nbytes}"
            )


def _rank(path: Path) -> int:
    rank = read_json(path, "adapter_config.json").get("r")
    if type(rank) is not int or rank < 1:
        raise InvalidWeightsError(
            f"adapter_config.json must have the adapter's rank as a whole number r of 1 or more, "
            f"not {rank!r}"
        )
    weights = path / "adapter_model.safetensors"
    if weights.exists():
        check_file(weights)
    return rank


_MOST_STEPS = 100_000
"""Steps that are kept: the last ones, about 10 MB of file."""


class SimulatedProfile:
    """Satisfies `control.operations.ProfileControl`. One file, with the steps of every rank."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
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
