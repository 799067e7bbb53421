"""The real engine: SGLang 0.5.23 behind the `Engine` protocol.

Requests are in `requests.runs`, operators' operations in `control`. SGLang's processes are watched;
when one is lost every open request fails and the worker is told, once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from prometheus_client.core import Metric

from millstream_server.control.engine import EngineLoad, LoadProgress, Role, warm_up_by_probe
from millstream_server.control.operations import NO_CONTROLS
from millstream_server.engines.model_loading import WeightsProgress
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.control.controlled import ControlledEngine
from millstream_server.engines.sglang.control.operations import make_controls
from millstream_server.engines.sglang.describe import (
    describe,
    probe_request,
    running_limit,
    with_media_model,
)
from millstream_server.engines.sglang.dllm import BlockBudget, check_model
from millstream_server.engines.sglang.kv_events.feed import KvEventFeed
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.loads import KvBlocks, RankProgress
from millstream_server.engines.sglang.requests.runs import Run, Runs
from millstream_server.engines.sglang.requests.translate import generate_arguments
from millstream_server.engines.sglang.resume import resumes
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Ability
from millstream_server.kv_cache.events import KvEventSink
from millstream_server.model_files.weights import fingerprint
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    ServingError,
)

__all__ = ["SglangEngine", "SglangEngineConfig"]


class SglangEngine:
    """`sgl.Engine` as an `control.engine.Engine`.

    SGLang keeps its configuration in process globals and its shutdown kills every child of the
    process, so a process holds one engine. `start` must run on the main thread's loop.
    """

    def __init__(self, config: SglangEngineConfig) -> None:
        self._config = config
        self._progress = RankProgress()
        self._runs = Runs(config, self._progress)
        self._lifetime: SglangLifetime[GeneratorInfo] = SglangLifetime(
            self._runs.fail_all, self._progress
        )
        self._probes: dict[int, Run] = {}
        self._kv = KvEventFeed()
        self._weights = WeightsProgress(Path(config.model_path))
        self.controls = NO_CONTROLS
        """What operators can do with it, from the end of `start` to `close`."""

    def follow_kv(self, sink: KvEventSink) -> None:
        self._kv.follow(sink)

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        if self._config.role is Role.DIFFUSION:
            check_model(Path(self._config.model_path))
        self._config, media = with_media_model(self._config)
        self._config = self._kv.open(self._config)
        built = await self._lifetime.start(self._config)
        self._weights.all_read()
        info = describe(
            built,
            self._config,
            await running_limit(built),
            media,
            model_hash=await asyncio.to_thread(fingerprint, Path(self._config.model_path)),
            tells_kv=self._kv.started(),
        )
        if self._config.role is Role.DIFFUSION:
            self._runs.blocks = BlockBudget(built.total_tokens, info.block_size)
        self._lifetime.blocks = KvBlocks(info.block_size, info.total_blocks)
        self._lifetime.started(built, info, on_failure)
        self._runs.start(built)
        if self._config.may_resume and await resumes(built, self._config):
            info = replace(info, abilities=info.abilities | {Ability.RESUMED_OUTPUT})
        self.controls = await make_controls(
            ControlledEngine(self._config, built, info, self._runs, self._lifetime, self._kv)
        )
        return info

    def load_progress(self) -> LoadProgress:
        return self._weights.look()

    async def warm_up(self) -> None:
        _, info = self._lifetime.ready()
        await warm_up_by_probe(self, self._config.warm_up_timeout_s, ranks=info.dp_size)

    def progress(self, dp_rank: int) -> int:
        """See `Probeable.progress`; a long prefill counts chunk by chunk."""
        return self._progress.of(dp_rank)

    async def probe(self, dp_rank: int) -> None:
        """Run two tokens through; P/D roles transfer to or from SGLang's fake peer.

        An aborted probe stays until its scheduler has let go of it, which a scheduler that hangs
        doesn't: the next probe waits for that, so that a long hang doesn't pile them up.
        """
        earlier = self._probes.get(dp_rank)
        if earlier is not None and earlier.task is not None:
            await asyncio.wait({earlier.task})
        built, info = self._lifetime.ready()
        request = probe_request(built, self._config.role)
        arguments = generate_arguments(request, self._config.role)
        if info.dp_size > 1:
            arguments["routed_dp_rank"] = dp_rank
        sink = CollectingSink()
        run = self._probes[dp_rank] = Run(request=request, sink=sink, arguments=arguments)
        self._runs.launch(run)
        try:
            finish = await sink.result()
        except asyncio.CancelledError:
            self.abort(request.engine_id)
            raise
        if finish.reason is FinishReason.CANCELLED:
            raise EngineFailedError("The engine dropped the probe.")

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Start a request; see `Generator.submit`. An unchecked token id would end the engine."""
        try:
            built, _ = self._lifetime.ready()
            if request.engine_id in self._runs:
                raise InternalError("The request's engine id is in use.")
            if request.ticket and request.ticket.bootstrap_host == built.fake_bootstrap_host:
                raise InvalidRequestError.of("ticket", "it names no prefill worker")
            arguments = generate_arguments(request, self._config.role)
        except ServingError as error:
            asyncio.get_running_loop().call_soon(sink.fail, error)
            return
        self._runs.launch(Run(request=request, sink=sink, arguments=arguments))

    def abort(self, engine_id: str) -> None:
        self._runs.abort(engine_id)

    async def load(self) -> EngineLoad:
        _, info = self._lifetime.ready()
        load = await self._lifetime.load(len(self._runs), may_wake=self._runs.gate.is_open)
        if (budget := self._runs.blocks) is None:
            return load
        return budget.counted(load, info.max_running_requests)

    def metrics(self) -> Iterable[Metric]:
        return self._lifetime.metrics()

    async def close(self) -> None:
        """Stop SGLang's processes, also while they start; see `Engine.close`."""
        await self._lifetime.close(self._runs.tasks)
        self._kv.close()
