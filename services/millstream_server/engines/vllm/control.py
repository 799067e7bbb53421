"""What operators can do with a vLLM engine.

vLLM's client answers utility calls in order, but never when the core process ends: `Core.call`
notices that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from millstream_server.control.operations import (
    DiskWeights,
    EngineControls,
    LoraAdapter,
    MemoryTag,
    MemoryUse,
    PauseMode,
    ProfileActivity,
    Progress,
    WeightSource,
)
from millstream_server.engines.checkpoint import (
    Checkpoint,
    adapter_tensors,
    read_checkpoint,
    read_json,
)
from millstream_server.engines.gate import Hold
from millstream_server.engines.operations import (
    check_disk,
    check_files,
    measure,
    refuse_open,
    until_flushed,
)
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.kv_feed import LOAD_MARK, KvFeed
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.lifetime import VllmLifetime
from millstream_server.engines.vllm.runs import Runs
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidWeightsError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

T = TypeVar("T")
_POLL_S = 0.02
_SLEEP_LEVELS = {MemoryTag.WEIGHTS: 1, MemoryTag.KV_CACHE: 1}


@dataclass(frozen=True, slots=True, eq=False)
class Core:
    """What all operations use."""

    config: VllmEngineConfig
    built: BuiltEngine
    info: GeneratorInfo
    runs: Runs
    kv: KvFeed
    lifetime: VllmLifetime[GeneratorInfo]

    @property
    def client(self) -> Any:
        """VLLM's client."""
        return self.built.client

    async def call(self, call: Coroutine[Any, Any, T]) -> T:
        """Await one of the client's calls.

        Raises:
            EngineFailedError: vLLM has ended.
        """
        return await self.lifetime.answer(asyncio.ensure_future(call))

    @contextlib.asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Let requests wait in vLLM in the ``with`` block; after it if an operator says so."""
        gate = self.runs.gate
        gate.close(Hold.UPDATING)
        try:
            await self.call(self.client.pause_scheduler_async("keep", False))  # noqa: FBT003
            yield
        finally:
            gate.release(Hold.UPDATING)
            if gate.is_open and not self.lifetime.failure:
                await self.call(self.client.resume_scheduler_async())

    async def flush_cache(self) -> None:
        """See `control.operations.CacheControl`; what media left is emptied, too.

        Raises:
            EngineBusyError: requests are open, or blocks are kept for decode.
        """
        refuse_open(len(self.runs))
        await until_flushed(lambda: self.call(self.client.reset_prefix_cache_async()))
        self.kv.flushed()
        if self.info.media is not None:
            await self.call(self.client.reset_mm_cache_async())
            await self.call(self.client.reset_encoder_cache_async())


class Pause:
    """See `control.operations.PauseControl`; new requests wait in vLLM, where aborts reach them."""

    def __init__(self, core: Core) -> None:
        """It isn't paused."""
        self._core = core

    async def pause(self, mode: PauseMode) -> None:
        core = self._core
        if mode is PauseMode.RETRACT:
            raise UnsupportedFeatureError(
                "vLLM can't be paused with RETRACT. Use IN_PLACE, or ABORT."
            )
        core.runs.gate.close(Hold.PAUSED)
        if mode is PauseMode.ABORT:
            core.runs.pause_out()
            await core.call(core.client.pause_scheduler_async("abort", False))  # noqa: FBT003
            await core.call(core.runs.outputs.barrier())
        else:
            await core.call(core.client.pause_scheduler_async("keep", False))  # noqa: FBT003

    async def go_on(self) -> None:
        core = self._core
        await core.call(core.client.resume_scheduler_async())
        core.runs.gate.release(Hold.PAUSED)


class Memory:
    """See `control.operations.MemoryControl`; on a GPU, with `-- --enable-sleep-mode`.

    Not run here, where there is no GPU.
    """

    def __init__(self, core: Core) -> None:
        """Nothing is released."""
        self._core = core

    async def release_memory(self, tags: Collection[MemoryTag]) -> None:
        core = self._core
        if set(tags) != _SLEEP_LEVELS.keys():
            raise UnsupportedFeatureError(
                "vLLM releases the weights and the KV cache together: give KV_CACHE and WEIGHTS."
            )
        await core.flush_cache()
        core.runs.gate.close(Hold.RELEASED)
        await core.call(core.client.sleep_async(1))

    async def resume_memory(self, tags: Collection[MemoryTag]) -> None:
        core = self._core
        names = [tag.value for tag in MemoryTag if tag in tags]
        if await core.call(core.client.wake_up_async(names)):
            core.runs.gate.release(Hold.RELEASED)

    async def memory_use(self) -> MemoryUse:
        return await asyncio.to_thread(measure, self._core.built.pids(), on_gpu=True)


class Weights:
    """See `control.operations.WeightControl`; from disk only.

    vLLM takes the old weights away before it looks at the new ones, and takes a path that isn't
    there for a name at a model hub. So files are checked first; what still fails is followed by the
    old weights, or by the engine's end.
    """

    def __init__(self, core: Core, loaded: Checkpoint) -> None:
        """``loaded`` is what the engine has loaded at its start."""
        self._core = core
        self._loaded = loaded
        self._version = core.info.weight_version
        self._path = loaded.path

    async def check_weights(self, source: WeightSource, progress: Progress) -> None:
        await check_disk(_disk(source), self._loaded, progress)

    async def update_weights(self, source: WeightSource, version: str) -> None:
        core, path = self._core, _disk(source)
        # Once more, in milliseconds: files may have changed.
        await asyncio.to_thread(check_files, path, self._loaded)
        async with core.standing_still():
            try:
                await self._load(path, version)
            except EngineFailedError:
                raise
            except Exception as error:  # of vLLM's, as text
                log.error("the weights weren't updated", reason=str(error))
                await self._restore()
                raise InvalidWeightsError(
                    "vLLM couldn't load the weights; the old ones are in place."
                ) from error
            self._path, self._version = path, version

    async def _load(self, path: Path, version: str) -> None:
        core = self._core
        arguments = {"weights_path": str(path)}
        await core.call(core.client.collective_rpc_async("reload_weights", None, (), arguments))
        if not await core.call(core.client.reset_prefix_cache_async()):
            raise InternalError("vLLM has kept what it computed with the old weights.")
        core.kv.flushed()
        if core.info.media is not None:
            await core.call(core.client.reset_encoder_cache_async())
        await core.call(core.client.set_weight_version_async(version))

    async def _restore(self) -> None:
        try:
            await self._load(self._path, self._version)
        except Exception as error:  # whatever it is: no weights are left
            self._core.lifetime.lose(f"it has no weights: {error}")
            raise EngineFailedError(
                "The update failed half-way, and the old weights can't be restored."
            ) from error


def _disk(source: WeightSource) -> Path:
    if not isinstance(source, DiskWeights):
        raise UnsupportedFeatureError(
            f"This engine takes weights from disk only, not {type(source).__name__}."
        )
    return source.path


class Profile:
    """See `control.operations.ProfileControl`.

    vLLM writes into a directory that it was given at its start, so files are moved.
    """

    def __init__(self, core: Core, folder: Path) -> None:
        """``folder`` is what vLLM was given."""
        self._core = core
        self._folder = folder
        self._target: Path | None = None

    async def start_profile(
        self, directory: Path, activities: Collection[ProfileActivity], steps: int
    ) -> None:
        core = self._core
        taken = {ProfileActivity.CPU} if core.config.on_cpu else set(ProfileActivity)
        if wrong := set(activities) - taken - {ProfileActivity.GPU}:
            names = ", ".join(sorted(activity.value for activity in wrong))
            raise UnsupportedFeatureError(f"This engine can't record {names}.")
        if core.config.on_cpu and ProfileActivity.GPU in activities:
            raise UnsupportedFeatureError(
                "This engine runs on a CPU and can't record gpu; it records cpu."
            )
        self._target = directory
        await core.call(core.client.profile_async(True, "vllm", None, steps or None))  # noqa: FBT003

    async def stop_profile(self) -> None:
        core, target = self._core, self._target
        await core.call(core.client.profile_async(False))  # noqa: FBT003
        if target is not None:
            await asyncio.to_thread(_move, self._folder, target)
        self._target = None


def _move(source: Path, target: Path) -> None:
    for file in source.iterdir():
        shutil.move(file, target / file.name)


class Adapters:
    """See `control.operations.AdapterControl`.

    vLLM loads what a request names, also what was removed. So requests name only what is in
    `Runs.adapters`. Each load has another name there: the prefix cache knows adapters by it.
    """

    def __init__(self, core: Core) -> None:
        """No adapter is loaded."""
        self._core = core
        self._numbers = itertools.count(1)

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        core = self._core
        rank = await asyncio.to_thread(_check_adapter, path, core.config.max_lora_rank)
        number = next(self._numbers)
        request = core.built.vllm.LoRARequest(
            lora_name=f"{name}{LOAD_MARK}{number}", lora_int_id=number, lora_path=str(path)
        )
        try:
            added = await core.call(core.client.add_lora_async(request))
        except EngineFailedError:
            raise
        except Exception as error:  # of vLLM's, as text
            log.error("the adapter wasn't loaded", adapter=name, reason=str(error))
            with contextlib.suppress(Exception):  # there may be nothing of it
                await core.call(core.client.remove_lora_async(number))
            raise InvalidWeightsError(
                f"vLLM couldn't load the adapter {name!r} from {path}: {_last_line(error)}"
            ) from error
        if not added:
            raise InvalidWeightsError(f"vLLM couldn't load the adapter {name!r} from {path}.")
        core.runs.adapters[name] = request
        return LoraAdapter(name, rank, path)

    async def unload_adapter(self, name: str) -> None:
        core = self._core
        request = core.runs.adapters.pop(name)
        while core.runs.uses(name):  # noqa: ASYNC110 - seldom, and for seconds
            await asyncio.sleep(_POLL_S)
        await core.call(core.client.remove_lora_async(request.lora_int_id))
        core.kv.adapter_unloaded(name)


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1][:200]


def _check_adapter(path: Path, max_rank: int) -> int:
    """Check an adapter's files before vLLM reads them; return its rank."""
    config: Mapping[str, Any] = read_json(path / "adapter_config.json")
    rank = config.get("r")
    if config.get("peft_type") != "LORA" or type(rank) is not int or rank < 1:
        raise InvalidWeightsError(f"{path}/adapter_config.json isn't a LoRA adapter's.")
    if rank > max_rank:
        raise InvalidWeightsError(
            f"{path} has the rank {rank}; this worker takes up to {max_rank} (-- --max-lora-rank)."
        )
    adapter_tensors(path)
    return int(rank)


async def make_controls(core: Core, profiles: Path) -> EngineControls:
    """Return what operators can do with an engine that has started."""
    try:
        loaded = await asyncio.to_thread(read_checkpoint, Path(core.config.model_path))
    except InvalidWeightsError as error:
        log.warning("weights can't be loaded at runtime", reason=error.message)
        loaded = None
    sleeps = not core.config.on_cpu and core.config.extra.get("enable_sleep_mode")
    return EngineControls(
        memory=Memory(core) if sleeps else None,
        pause=Pause(core),
        cache=core,
        weights=None if loaded is None else Weights(core, loaded),
        profile=Profile(core, profiles),
        adapters=Adapters(core) if core.info.takes_adapters else None,
    )
