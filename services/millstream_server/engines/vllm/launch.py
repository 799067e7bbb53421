"""Starts vLLM's core processes, and stops them, without blocking this process's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.engines import torch_on_cpu
from millstream_server.engines.vllm import core_process, names
from millstream_server.engines.vllm.config import (
    VllmEngineConfig,
    engine_arguments,
    engine_environment,
    total_blocks,
)
from millstream_server.engines.vllm.handoff import SideChannel, side_channel
from millstream_server.engines.vllm.names import Vllm
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

ON_PATH = Path(__file__).resolve().parent / "on_path"
_ENDING_POLL_S = 0.2
_SHUTDOWN_S = 10.0
_CORE_NAME = "EngineCore"
_TRANSFER_WORKER = "millstream_server.engines.vllm.transfer_worker.TransferWorker"
"""Imported by vLLM's workers only."""
_one_at_a_time = threading.Lock()
"""vLLM reads its environment while it starts; only tests start two in one process."""


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A running vLLM and what the adapter reads from it."""

    vllm: Vllm
    client: Any
    """vLLM's `AsyncMPClient`."""
    config: Any
    """vLLM's `VllmConfig`, filled in by its core processes."""
    tokenizer: Any
    """vLLM's own; None: it has none."""
    eos: frozenset[int]
    channel: SideChannel | None
    """Prefill and decode: where this engine's hand-offs are arranged."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return int(self.config.model_config.get_vocab_size())

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return int(self.config.cache_config.block_size)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return int(self.config.parallel_config.data_parallel_size)

    @property
    def rank_blocks(self) -> int:
        """KV blocks of a rank; vLLM keeps one for itself."""
        return int(self.config.cache_config.num_gpu_blocks) // self.ranks - 1

    def core_pids(self) -> list[int]:
        """Return the ids of vLLM's core processes, one for each rank."""
        return _core_pids(self.client)

    def pids(self) -> list[int]:
        """Return the ids of vLLM's processes."""
        return [process.pid for process in _tree(self.client)]


def _core_pids(client: Any) -> list[int]:
    return [process.pid for process in client.resources.engine_manager.processes]


def _tree(client: Any) -> list[Any]:
    """Return vLLM's processes, core processes before their workers."""
    psutil: Any = importlib.import_module("psutil")
    found = []
    for pid in _core_pids(client):
        with contextlib.suppress(psutil.Error):
            core = psutil.Process(pid)
            found += [core, *core.children(recursive=True)]
    return found


class EngineStart:
    """One start of vLLM in a thread, and its end; also in the middle of the start."""

    def __init__(self) -> None:
        """Start nothing yet."""
        self._built: asyncio.Future[BuiltEngine] | None = None
        self._ended = threading.Event()
        self._before: set[int | None] = set()
        self._processes: list[Any] = []
        """Core processes and their workers, which a core that was killed leaves behind."""

    async def build(self, config: VllmEngineConfig) -> BuiltEngine:
        """Import vLLM, start its processes and load the model.

        Raises:
            EngineFailedError: one of these failed; no process is left running.
        """
        self._before = {child.pid for child in multiprocessing.active_children()}
        self._built = asyncio.ensure_future(asyncio.to_thread(self._build, config))
        return await asyncio.shield(self._built)

    def _build(self, config: VllmEngineConfig) -> BuiltEngine:
        with _one_at_a_time:
            return self._build_here(config)

    def _build_here(self, config: VllmEngineConfig) -> BuiltEngine:
        os.environ.update(engine_environment(config))
        if config.on_cpu:
            torch_on_cpu.prepare()
            torch_on_cpu.put_on_path(ON_PATH)
        vllm = names.load()
        core_process.install()
        channel = side_channel(config) if config.role.hands_off else None
        arguments = engine_arguments(config)
        if config.kv_publisher is not None:
            arguments["kv_events_config"] = vllm.KVEventsConfig(**config.kv_publisher)
        if channel is not None:
            os.environ.update(channel.environment())
            arguments["kv_transfer_config"] = vllm.KVTransferConfig(**channel.transfer_config())
            arguments["worker_extension_cls"] = _TRANSFER_WORKER
        try:
            vllm_config = _configured(vllm, config, arguments)
        except Exception as error:  # the vendor's seam: pydantic's, ValueError, OSError
            log.error("vLLM refused its settings", error=error)
            raise EngineFailedError(f"vLLM can't start with these settings: {error}") from error
        if self._ended.is_set():
            raise EngineFailedError("The engine was closed while it started.")
        try:
            client = vllm.EngineCoreClient.make_async_mp_client(
                vllm_config=vllm_config,
                executor_class=vllm.Executor.get_class(vllm_config),
                log_stats=True,
            )
        except Exception as error:  # likewise
            self.kill()
            if self._ended.is_set():
                raise EngineFailedError("The engine was closed while it started.") from error
            log.error("vLLM didn't start", error=error)
            raise EngineFailedError(
                "vLLM's core process ended while it loaded the model; what it printed before, on "
                "this worker's stderr, says why. Often memory is short (--max-total-tokens), or "
                "the model is of a kind that this vLLM doesn't have."
            ) from error
        self._processes = _tree(client)
        return BuiltEngine(
            vllm, client, vllm_config, _tokenizer(config, vllm_config), _eos(vllm_config), channel
        )

    def kill(self) -> None:
        """Kill the core processes that this start has made, and what they have started."""
        psutil: Any = importlib.import_module("psutil")
        left = list(self._processes)
        for child in multiprocessing.active_children():
            if child.pid not in self._before and child.name.startswith(_CORE_NAME):
                with contextlib.suppress(psutil.Error):
                    core = psutil.Process(child.pid)
                    left += [core, *core.children(recursive=True)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # does nothing if the id is another process's by now
        psutil.wait_procs(left, timeout=_SHUTDOWN_S)

    async def end(self) -> None:
        """Stop vLLM's processes, also while they start."""
        self._ended.set()
        if self._built is None:
            return
        while not self._built.done():
            await asyncio.to_thread(self.kill)  # then the client's constructor fails
            await asyncio.wait([self._built], timeout=_ENDING_POLL_S)
        if not self._built.cancelled() and self._built.exception() is None:
            client = self._built.result().client
            await asyncio.to_thread(client.shutdown, _SHUTDOWN_S)
            await asyncio.sleep(0)  # it closes its sockets on this loop
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SHUTDOWN_S):
                    await asyncio.to_thread(client.resources.ctx.term)
        await asyncio.to_thread(self.kill)


def _configured(vllm: Vllm, config: VllmEngineConfig, arguments: dict[str, object]) -> Any:
    """Make vLLM's configuration; the KV cache's size follows from its blocks' size."""
    made = vllm.AsyncEngineArgs(**arguments).create_engine_config()
    blocks = total_blocks(config, int(made.cache_config.block_size))
    if blocks is not None:
        made.cache_config.num_gpu_blocks_override = blocks
    return made


def _tokenizer(config: VllmEngineConfig, vllm_config: Any) -> Any:
    if not config.has_tokenizer:
        return None
    tokenizers: Any = importlib.import_module("vllm.tokenizers")
    return tokenizers.cached_tokenizer_from_config(vllm_config.model_config)


def _eos(vllm_config: Any) -> frozenset[int]:
    """Return the ids that end an answer, of config.json and generation_config.json."""
    model = vllm_config.model_config
    found: set[int] = set()
    given = (
        getattr(model.hf_config, "eos_token_id", None),
        getattr(model.hf_text_config, "eos_token_id", None),
        model.try_get_generation_config().get("eos_token_id"),
    )
    for ids in given:
        if ids is not None:
            found |= {ids} if isinstance(ids, int) else set(ids)
    return frozenset(found)
