"""Loads LoRA adapters into SGLang, and removes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millstream_server.control.operations import LoraAdapter
from millstream_server.engines.sglang.control.adapter_files import AdapterLimits, check_adapter
from millstream_server.engines.sglang.control.checkpoint import Checkpoint
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.runtime.errors import InternalError, InvalidWeightsError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


class SglangAdapters:
    """See `control.operations.AdapterControl`.

    SGLang keeps an adapter's path after its removal, and loads it again for the next request that
    names it. So requests are checked against our own list, and SGLang forgets the path.
    """

    def __init__(self, engine: ControlledEngine, loaded: Checkpoint) -> None:
        """No adapter is loaded."""
        self._engine = engine
        self._loaded = loaded
        self._limits = AdapterLimits(
            max_rank=engine.config.max_lora_rank, modules=engine.config.lora_target_modules
        )

    async def load_adapter(self, name: str, path: Path) -> LoraAdapter:
        """See `AdapterControl.load_adapter`."""
        engine = self._engine
        adapter = await asyncio.to_thread(check_adapter, name, path, self._loaded, self._limits)
        message = engine.messages.LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(path))
        result = await engine.call(engine.manager.load_lora_adapter(message))
        if not result.success:
            log.error("the adapter wasn't loaded", adapter=name, reason=result.error_message)
            await self._clear_away(name)
            raise InvalidWeightsError(f"SGLang couldn't load the adapter {name!r} from {path}.")
        engine.runs.adapters.add(name)
        return adapter

    async def _clear_away(self, name: str) -> None:
        """Remove what a failed load has left, which SGLang would refuse to load again."""
        engine = self._engine
        if name in engine.manager.pending_lora_unloads:
            message = engine.messages.UnloadLoRAAdapterReqInput(lora_name=name)
            await engine.call(engine.manager.unload_lora_adapter(message))
        engine.manager.lora_ref_cache.pop(name, None)

    async def unload_adapter(self, name: str) -> None:
        """See `AdapterControl.unload_adapter`."""
        engine = self._engine
        engine.runs.adapters.discard(name)
        engine.manager.lora_ref_cache.pop(name, None)
        message = engine.messages.UnloadLoRAAdapterReqInput(lora_name=name)
        result = await engine.call(engine.manager.unload_lora_adapter(message))
        if not result.success:
            log.error("the adapter wasn't removed", adapter=name, reason=result.error_message)
            raise InternalError(f"SGLang couldn't remove the adapter {name!r}.")
        engine.kv.adapter_unloaded(name)
