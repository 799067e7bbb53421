"""The real engine: SGLang 0.5.23 behind the `Engine` protocol.

One task per request drives `async_generate` and pushes into the request's sink. SGLang's processes
are watched; when one is lost every open request fails and the worker is told, once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.core import Metric

from millstream_server.engines.base import EngineLoad, Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.describe import (
    describe,
    probe_request,
    running_limit,
    with_media_model,
)
from millstream_server.engines.sglang.dllm import BlockBudget, check_model
from millstream_server.engines.sglang.kv_events.feed import KvEventFeed
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.lifetime import SglangLifetime
from millstream_server.engines.sglang.loads import KvBlocks, LoadReader
from millstream_server.engines.sglang.media import media_arguments
from millstream_server.engines.sglang.metrics import collect
from millstream_server.engines.sglang.progress import RankProgress
from millstream_server.engines.sglang.translate import (
    Chunk,
    cancelled,
    conclude,
    generate_arguments,
    read_chunk,
    translate_exception,
)
from millstream_server.engines.warm_up import warm_up_by_probe
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.kv_cache.events import KvEventSink
from millstream_server.model_files.fingerprint import fingerprint
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    ServingError,
)
from millstream_server.runtime.telemetry.log import get_log

__all__ = ["SglangEngine", "SglangEngineConfig"]

log = get_log(__name__)


@dataclass(slots=True, eq=False)
class _Run:
    """One request on its way through SGLang."""

    request: GenerationRequest
    sink: OutputSink
    arguments: dict[str, object]
    task: asyncio.Task[None] | None = None
    started: bool = False
    preparing: bool = False
    """It waits for KV cache, or its media are being put together; SGLang doesn't know it yet."""
    aborted: bool = False
    over: bool = False
    taken: int = 0
    """Tokens SGLang has handed over."""

    def end(self, result: Finish | ServingError) -> None:
        """Report the end, unless it was reported."""
        if self.over:
            return
        self.over = True
        if isinstance(result, ServingError):
            self.sink.fail(result)
        else:
            self.sink.finish(result)


class SglangEngine:
    """`sgl.Engine` as an `engines.base.Engine`.

    SGLang keeps its configuration in process globals and its shutdown kills every child of the
    process, so a process holds one engine. `start` must run on the main thread's loop.

    """

    def __init__(self, config: SglangEngineConfig) -> None:
        """Start nothing yet, import nothing of SGLang."""
        self._config = config
        self._lifetime = SglangLifetime(self._fail_all)
        self._runs: dict[str, _Run] = {}
        self._probes: dict[int, _Run] = {}
        self._progress = RankProgress()
        self._loads = LoadReader()
        self._kv = KvEventFeed()
        self._blocks: BlockBudget | None = None
        """Of a diffusion language model."""
        self._built: BuiltEngine | None = None
        self._info: GeneratorInfo | None = None

    def follow_kv(self, sink: KvEventSink) -> None:
        """See `kv_cache.events.KvEventSource.follow_kv`."""
        self._kv.follow(sink)

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        """Load the model in a thread of its own; see `Engine.start`."""
        if self._config.role is Role.DIFFUSION:
            check_model(Path(self._config.model_path))
        self._config, media = with_media_model(self._config)
        self._config = self._kv.open(self._config)
        self._built = built = await self._lifetime.start(self._config)
        self._progress.read_loads_from(built.engine.tokenizer_manager.load_snapshot_reader)
        info = describe(
            built,
            self._config,
            await running_limit(built),
            media,
            model_hash=await asyncio.to_thread(fingerprint, Path(self._config.model_path)),
            tells_kv=self._kv.started(),
        )
        if self._config.role is Role.DIFFUSION:
            self._blocks = BlockBudget(built.total_tokens, info.block_size)
        self._lifetime.started(on_failure)
        self._info = info
        return info

    async def warm_up(self) -> None:
        """Probe every rank, within the warm-up limit each."""
        _, info = self._ready()
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
        built, info = self._ready()
        request = probe_request(built, self._config.role)
        arguments = generate_arguments(request, self._config.role)
        if info.dp_size > 1:
            arguments["routed_dp_rank"] = dp_rank
        sink = CollectingSink()
        run = self._probes[dp_rank] = _Run(request, sink, arguments)
        self._launch(run)
        try:
            finish = await sink.result()
        except asyncio.CancelledError:
            self.abort(request.engine_id)
            raise
        if finish.reason is FinishReason.CANCELLED:
            message = "The engine dropped the probe."
            raise EngineFailedError(message)

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Start a request; see `Generator.submit`. An unchecked token id would end the engine."""
        try:
            built, _ = self._ready()
            if request.engine_id in self._runs:
                message = "The request's engine id is in use."
                raise InternalError(message)
            if request.ticket and request.ticket.bootstrap_host == built.fake_bootstrap_host:
                raise InvalidRequestError.of("ticket", "it names no prefill worker")
            arguments = generate_arguments(request, self._config.role)
        except ServingError as error:
            asyncio.get_running_loop().call_soon(sink.fail, error)
            return
        self._launch(_Run(request, sink, arguments))

    def _launch(self, run: _Run) -> None:
        self._runs[run.request.engine_id] = run
        run.task = asyncio.create_task(self._drive(run), name=f"sglang-{run.request.engine_id}")

    async def _drive(self, run: _Run) -> None:
        run.started = True
        try:
            if run.aborted:
                run.end(cancelled(run.request))
            elif not run.over:
                await self._generate(run)
        except asyncio.CancelledError:
            # By `abort`, before SGLang's scheduler knew the request, or after the engine's end.
            run.end(cancelled(run.request, emitted=self._reported(run)))
        except ServingError as error:
            run.end(error)
        except Exception as error:  # noqa: BLE001 - the vendor's seam: anything may come
            log.warning("SGLang refused a request", engine_id=run.request.engine_id, error=error)
            run.end(translate_exception(error))
        finally:
            del self._runs[run.request.engine_id]

    async def _generate(self, run: _Run) -> None:
        if self._blocks is None:
            await self._stream(run)
            return
        run.preparing = True
        async with self._blocks.room(run.request):
            run.preparing = False
            await self._stream(run)

    async def _stream(self, run: _Run) -> None:
        built, _ = self._ready()
        if media := run.request.prompt.media:
            run.preparing = True  # in a thread: it reads every number
            found = await asyncio.to_thread(media_arguments, media, self._config.role)
            run.arguments.update(found)
            run.preparing = False
        stream = await built.engine.async_generate(**run.arguments)
        async with contextlib.aclosing(stream):
            async for raw in stream:
                chunk = read_chunk(raw)
                run.taken += len(chunk.token_ids)
                self._progress.note(raw)
                if chunk.token_ids and self._config.role is not Role.PREFILL and not run.over:
                    run.sink.emit(chunk.token_ids, chunk.logprobs)
                if chunk.finish_reason is not None:
                    self._conclude(run, chunk)
        run.end(InternalError("The engine ended the request without a reason."))

    def _conclude(self, run: _Run, chunk: Chunk) -> None:
        result = conclude(chunk, run.request, emitted=self._reported(run), aborted=run.aborted)
        if isinstance(result, ServingError):
            log.warning(
                "SGLang failed a request",
                engine_id=run.request.engine_id,
                reason=str(chunk.finish_reason),
            )
        run.end(result)

    def _reported(self, run: _Run) -> int:
        """Count the tokens the sink got: a prefill engine's one token is the decode engine's."""
        return 0 if self._config.role is Role.PREFILL else run.taken

    def abort(self, engine_id: str) -> None:
        """Stop a request; see `Engine.abort`."""
        run = self._runs.get(engine_id)
        if run is None or run.aborted or self._built is None:
            return
        run.aborted = True
        if not run.started or run.task is None:
            return  # `_drive` looks at the flag first thing
        if run.preparing:
            run.task.cancel()
            return
        manager = self._built.engine.tokenizer_manager
        state = manager.rid_to_state.get(engine_id)
        if state is None:
            return  # its last chunk is on the way to `_drive`
        if state.dispatched:
            manager.abort_request(engine_id)
        else:
            # SGLang would send the abort ahead of the request and never send it again.
            run.task.cancel()

    async def load(self) -> EngineLoad:
        """See `Engine.load`."""
        built, info = self._ready()
        manager = built.engine.tokenizer_manager
        blocks = KvBlocks(info.block_size, info.total_blocks)
        load = await self._loads.read(manager, blocks, open_requests=len(self._runs))
        return (
            load if self._blocks is None else self._blocks.counted(load, info.max_running_requests)
        )

    def metrics(self) -> Iterable[Metric]:
        """Give SGLang's own metrics; see `worker.engine_metrics.MetricsSource`."""
        if self._info is None:
            return ()
        return collect(KvBlocks(self._info.block_size, self._info.total_blocks))

    def _fail_all(self, message: str) -> None:
        for run in list(self._runs.values()):
            run.end(EngineFailedError(message))
            if run.task is not None and run.started:
                run.task.cancel()

    def _ready(self) -> tuple[BuiltEngine, GeneratorInfo]:
        if self._lifetime.failure:
            raise EngineFailedError(self._lifetime.failure)
        if self._built is None or self._info is None:
            message = "The engine has not started."
            raise EngineFailedError(message)
        return self._built, self._info

    async def close(self) -> None:
        """Stop SGLang's processes, also while they start; see `Engine.close`."""
        await self._lifetime.close(
            lambda: [run.task for run in self._runs.values() if run.task is not None]
        )
        self._kv.close()
