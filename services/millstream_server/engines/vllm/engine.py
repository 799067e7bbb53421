"""vLLM behind the `Engine` protocol: its core process, by the client that `AsyncLLM` has too.

Requests are in `runs`, operators' operations in `control`, hand-offs in `handoff`.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import Metric

from millstream_server.control.engine import EngineLoad, LoadProgress, Role, warm_up_by_probe
from millstream_server.control.operations import NO_CONTROLS, EngineControls
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.control import Core, make_controls
from millstream_server.engines.vllm.kv_feed import KvFeed
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.lifetime import VllmLifetime
from millstream_server.engines.vllm.loads import read_load
from millstream_server.engines.vllm.media import item_limits, media_model
from millstream_server.engines.vllm.metrics import VllmMetrics, collect
from millstream_server.engines.vllm.runs import Run, Runs
from millstream_server.engines.vllm.withdrawal import free_withdrawn
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.output import CollectingSink, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.kv_cache.events import KvEventSink
from millstream_server.model_files.weights import fingerprint
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    ServingError,
)


class VllmEngine:
    """See `generation.generator.GeneratorEngine`."""

    def __init__(self, config: VllmEngineConfig) -> None:
        """Start nothing yet, import nothing of vLLM."""
        self._config = config
        pulls = config.connector == "pull"  # so prefill has ended before decode begins
        timeout_s = config.transfer_timeout_s if pulls else config.handoff_wait_s
        self._runs = Runs(config.role, timeout_s, self._lose)
        self._lifetime: VllmLifetime[GeneratorInfo] = VllmLifetime(config, self._runs.fail_all)
        self._kv = KvFeed()
        self._probes: dict[int, asyncio.Task[None]] = {}
        self._controls = NO_CONTROLS
        self._profiles: Path | None = None

    def _lose(self, what: str) -> None:
        self._lifetime.lose(what)

    def follow_kv(self, sink: KvEventSink) -> None:
        """See `kv_cache.events.KvEventSource.follow_kv`."""
        if self._config.kv_events and self._config.extra.get("enable_prefix_caching") is not False:
            self._kv.follow(sink)

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        media = media_model(self._config.model_path, self._config.role)
        self._profiles = Path(tempfile.mkdtemp(prefix="millstream-profiles-"))
        self._config = replace(
            self._config,
            media=item_limits(media),
            profile_folder=str(self._profiles),
            kv_publisher=self._kv.publisher(),
        )
        built = await self._lifetime.start(self._config)
        if built.channel is not None and built.channel.writes:
            await free_withdrawn(built.client)
        model_hash = await asyncio.to_thread(fingerprint, Path(self._config.model_path))
        info = describe(built, self._config, media, model_hash=model_hash)
        info = replace(
            info,
            weight_version=await built.client.get_weight_version_async(),
            tells_kv=self._kv.started(built.ranks),
        )
        self._lifetime.started(built, info, on_failure)
        self._runs.start(built, VllmMetrics(built) if self._config.metrics else None)
        core = Core(self._config, built, info, self._runs, self._kv, self._lifetime)
        self._controls = await make_controls(core, self._profiles)
        return info

    def metrics(self) -> Iterable[Metric]:
        """See `worker.engine_metrics.MetricsSource`."""
        return collect() if self._config.metrics else ()

    def load_progress(self) -> LoadProgress:
        """See `control.engine.LoadObserved`."""
        return self._lifetime.load_progress()

    @property
    def controls(self) -> EngineControls:
        """What operators can do with it, from the end of `start` to `close`."""
        return self._controls

    async def warm_up(self) -> None:
        _, info = self._lifetime.ready()
        await warm_up_by_probe(self, self._config.warm_up_timeout_s, ranks=info.dp_size)

    def progress(self, dp_rank: int) -> int:
        return self._runs.outputs.steps(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        """Run two tokens through; without a hand-off, which needs a peer.

        An aborted probe stays until vLLM has let go of it, which a vLLM that hangs doesn't: the
        next probe waits for the same one, so that a long hang doesn't pile them up.
        """
        _, info = self._lifetime.ready()
        probe = self._probes.get(dp_rank)
        if probe is None or probe.done():
            rank = dp_rank if info.dp_size > 1 else None
            probe = self._probes[dp_rank] = asyncio.create_task(self._probe(rank))
            probe.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(probe)

    async def _probe(self, dp_rank: int | None) -> None:
        request = GenerationRequest(
            prompt=Prompt((0,) * 4),
            sampling=Sampling(max_new_tokens=2, temperature=0.0, ignore_eos=True),
            dp_rank=dp_rank,
        )
        sink = CollectingSink()
        self._runs.launch(Run(request=request, sink=sink, core_id=request.engine_id))
        finish = await sink.result()
        if finish.reason is FinishReason.CANCELLED:
            raise EngineFailedError("The engine dropped the probe.")

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        try:
            built, _ = self._lifetime.ready()
            if request.engine_id in self._runs:
                raise InternalError("The request's engine id is in use.")
            channel = built.channel
            run = Run(
                request=request,
                sink=sink,
                core_id=channel.core_id(request) if channel else request.engine_id,
                transfer=channel.parameters(request) if channel else {},
            )
        except ServingError as error:
            asyncio.get_running_loop().call_soon(sink.fail, error)
            return
        self._runs.launch(run)

    def abort(self, engine_id: str) -> None:
        self._runs.abort(engine_id)

    async def load(self) -> EngineLoad:
        built, _ = self._lifetime.ready()
        return read_load(built, self._runs)

    async def close(self) -> None:
        if self._lifetime.closed:
            return
        await self._lifetime.close()
        await self._runs.close()
        self._kv.close()
        if self._profiles is not None:
            shutil.rmtree(self._profiles, ignore_errors=True)


def describe(
    built: BuiltEngine, config: VllmEngineConfig, media: MediaModel | None, *, model_hash: str
) -> GeneratorInfo:
    """Read what the worker tells its callers."""
    vllm = built.config
    prefill = config.role is Role.PREFILL
    total = built.rank_blocks * built.ranks
    return GeneratorInfo(
        engine="vllm",
        engine_version=built.vllm.version,
        device=str(vllm.device_config.device_type),
        vocab_size=built.vocab_size,
        # A longer request would wait for ever for blocks that there aren't.
        context_length=min(
            int(vllm.model_config.max_model_len), built.rank_blocks * built.block_size
        ),
        block_size=built.block_size,
        total_blocks=total,
        max_running_requests=int(vllm.scheduler_config.max_num_seqs) * built.ranks,
        dp_size=built.ranks,
        abilities=config.abilities(),
        bootstrap_host=built.channel.host if prefill and built.channel else "",
        bootstrap_port=built.channel.port if prefill and built.channel else 0,
        kv_transfer=built.channel.announced(vllm) if built.channel else None,
        media=media,
        takes_adapters=config.max_loras_per_batch > 0,
        refused_fields=(
            frozenset({"sampling.min_p"}) if vllm.speculative_config is not None else frozenset()
        ),
        model_hash=model_hash,
        max_batched_tokens=int(vllm.scheduler_config.max_num_batched_tokens),
    )
