"""The real engine: SGLang 0.5.23 behind the `Engine` protocol.

One task per request drives `async_generate` and pushes into the request's sink. SGLang's processes
are watched; when one is lost every open request fails and the worker is told, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millstream_server.engines.base import (
    CollectingSink,
    EngineInfo,
    EngineLoad,
    Finish,
    FinishReason,
    GenerationRequest,
    KvHandoff,
    OutputSink,
    Role,
    Sampling,
    new_engine_id,
)
from millstream_server.engines.sglang_config import SglangEngineConfig
from millstream_server.engines.sglang_launch import BuiltEngine, EngineThread
from millstream_server.engines.sglang_progress import RankProgress, lock_to_read
from millstream_server.engines.sglang_translate import (
    Chunk,
    cancelled,
    conclude,
    generate_arguments,
    read_chunk,
    translate_exception,
)
from millstream_server.engines.sglang_watch import ProcessWatch
from millstream_server.engines.validation import check_request
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    ServingError,
)

__all__ = ["SglangEngine", "SglangEngineConfig"]

_log = logging.getLogger(__name__)
_LIMITS_WAIT_S = 10.0
_LIMITS_POLL_S = 0.02
_WAKE_LIMIT_S = 1.0
# Our own requests are nobody's trace; without a parent SGLang would make one of each.
_NOT_SAMPLED = {"traceparent": f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"}


@dataclass(slots=True, eq=False)
class _Run:
    """One request on its way through SGLang."""

    request: GenerationRequest
    sink: OutputSink
    arguments: dict[str, object]
    task: asyncio.Task[None] | None = None
    started: bool = False
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
        self._thread = EngineThread()
        self._watch = ProcessWatch(self._lose)
        self._runs: dict[str, _Run] = {}
        self._probes: dict[int, _Run] = {}
        self._progress = RankProgress()
        self._loads: list[Any] = []
        self._built: BuiltEngine | None = None
        self._info: EngineInfo | None = None
        self._responses: asyncio.Task[None] | None = None
        self._failure = ""
        self._on_failure: Callable[[ServingError], None] | None = None
        self._closed = False

    async def start(self, on_failure: Callable[[ServingError], None]) -> EngineInfo:
        """Load the model in a thread of its own; see `Engine.start`."""
        try:
            self._watch.catch_sigquit()
        except (RuntimeError, ValueError) as error:
            message = "SGLang must be started from the main thread's event loop."
            raise EngineFailedError(message) from error
        built = await self._thread.build(self._config)
        self._built = built
        self._receive_responses(built.engine.tokenizer_manager)
        self._watch.watch(built.engine.get_all_child_pids())
        info = self._describe(built, await self._running_limit(built))
        if self._failure:  # a process was lost meanwhile
            raise EngineFailedError(self._failure)
        self._info = info
        self._on_failure = on_failure
        return info

    def _receive_responses(self, manager: Any) -> None:
        """Run SGLang's response loop ourselves.

        `auto_create_handle_loop` would start it with the first request, and with it take over
        SIGTERM and SIGQUIT, and kill this process when the loop hits an exception.
        """
        manager.event_loop = asyncio.get_running_loop()
        self._responses = asyncio.create_task(manager.handle_loop(), name="sglang-responses")
        self._responses.add_done_callback(self._responses_ended)
        self._progress.read_loads_from(manager.load_snapshot_reader)

    def _responses_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            _log.error("SGLang's response loop ended", exc_info=task.exception())
            self._lose("its response loop ended")

    async def _running_limit(self, built: BuiltEngine) -> int:
        """Ask how many requests run at once; the scheduler publishes it when first idle."""
        configured = built.server_args.get("max_running_requests")
        if configured:
            return int(configured)
        for _ in range(math.ceil(_LIMITS_WAIT_S / _LIMITS_POLL_S)):
            loads = await built.engine.tokenizer_manager.get_loads()
            if loads and all(load.max_running_requests for load in loads):
                return sum(int(load.max_running_requests) for load in loads)
            await asyncio.sleep(_LIMITS_POLL_S)
        message = "SGLang's scheduler did not report its limits."
        raise EngineFailedError(message)

    def _describe(self, built: BuiltEngine, max_running_requests: int) -> EngineInfo:
        page_size = int(built.server_args.get("page_size") or 1)
        is_prefill = self._config.role is Role.PREFILL
        return EngineInfo(
            engine="sglang",
            engine_version=built.version,
            vocab_size=built.vocab_size,
            context_length=built.context_length,
            block_size=page_size,
            total_blocks=built.total_tokens // page_size,
            max_running_requests=max_running_requests,
            dp_size=int(built.server_args.get("dp_size") or 1),
            weight_version=str(built.server_args.get("weight_version") or ""),
            abilities=self._config.abilities(),
            bootstrap_host=self._config.bootstrap_host if is_prefill else "",
            bootstrap_port=self._config.bootstrap_port if is_prefill else 0,
        )

    async def warm_up(self) -> None:
        """Probe every rank, within the warm-up limit each."""
        _, info = self._ready()
        for rank in range(info.dp_size):
            try:
                async with asyncio.timeout(self._config.warm_up_timeout_s):
                    await self.probe(rank)
            except TimeoutError as error:
                message = f"The warm-up took longer than {self._config.warm_up_timeout_s:g} s."
                raise EngineFailedError(message) from error
            except ServingError as error:
                message = f"The warm-up failed: {error.message}"
                raise EngineFailedError(message) from error

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
        request = self._probe_request(built)
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

    def _probe_request(self, built: BuiltEngine) -> GenerationRequest:
        handoff = None
        if self._config.role is not Role.AGGREGATED:
            handoff = KvHandoff(built.fake_bootstrap_host, 0, secrets.randbits(63))
        return GenerationRequest(
            engine_id=new_engine_id(),
            token_ids=(0,) * 4,
            sampling=Sampling(max_new_tokens=2, temperature=0.0, ignore_eos=True),
            handoff=handoff,
            trace_headers=_NOT_SAMPLED,
        )

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Start a request; see `Engine.submit`.

        It is checked once more: one bad token id would end the engine for everybody.
        """
        try:
            built, info = self._ready()
            if request.engine_id in self._runs:
                message = "The request's engine id is in use."
                raise InternalError(message)
            check_request(request, info, self._config.role)
            if request.handoff and request.handoff.bootstrap_host == built.fake_bootstrap_host:
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
        except Exception as error:  # noqa: BLE001 - the vendor's seam: anything may come
            _log.warning("SGLang refused request %s", run.request.engine_id, exc_info=True)
            run.end(translate_exception(error))
        finally:
            del self._runs[run.request.engine_id]

    async def _generate(self, run: _Run) -> None:
        built, _ = self._ready()
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
            _log.warning("SGLang failed request %s: %s", run.request.engine_id, chunk.finish_reason)
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
        """Read the schedulers' last snapshots; a prefix that is only cached is not in use."""
        built, info = self._ready()
        manager = built.engine.tokenizer_manager
        loads = self._snapshots(manager.load_snapshot_reader)
        if not self._runs and any(load.num_used_tokens or load.num_running_reqs for load in loads):
            # An idle scheduler may sleep for a second on an old report: asking wakes it.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_WAKE_LIMIT_S):
                    await manager.get_internal_state()
            loads = self._snapshots(manager.load_snapshot_reader)
        running = queued = used_tokens = 0
        for load in loads:
            running += int(load.num_running_reqs)
            queued += int(load.num_waiting_reqs)
            used_tokens += int(load.num_used_tokens)
            if load.disaggregation is not None:
                running += int(load.disaggregation.prefill_inflight_queue_reqs)
            if load.queues is not None:
                queued += int(load.queues.grammar)
        return EngineLoad(
            running_requests=running,
            # Those on their way to the scheduler are in no snapshot yet.
            queued_requests=max(queued, len(self._runs) - running),
            used_blocks=math.ceil(used_tokens / info.block_size),
            total_blocks=info.total_blocks,
        )

    def _snapshots(self, reader: Any) -> list[Any]:
        """Read anew, unless a scheduler hangs while it holds the file: then what was read last."""
        descriptor = getattr(reader, "fd", None)
        if descriptor is None or lock_to_read(descriptor):
            self._loads = reader.read_all()  # takes the lock that we hold, and gives it back
        return self._loads

    def _lose(self, what: str) -> None:
        """Fail everything: a part of SGLang is gone."""
        if self._closed or self._failure:
            return
        _log.error("SGLang is lost: %s", what)
        self._fail_all("The engine behind this worker died.")
        if self._on_failure is not None:
            self._on_failure(EngineFailedError(self._failure))

    def _fail_all(self, message: str) -> None:
        self._failure = message
        for run in list(self._runs.values()):
            run.end(EngineFailedError(message))
            if run.task is not None and run.started:
                run.task.cancel()

    def _ready(self) -> tuple[BuiltEngine, EngineInfo]:
        if self._failure:
            raise EngineFailedError(self._failure)
        if self._built is None or self._info is None:
            message = "The engine has not started."
            raise EngineFailedError(message)
        return self._built, self._info

    async def close(self) -> None:
        """Stop SGLang's processes, also while they start; see `Engine.close`."""
        if self._closed:
            return
        self._closed = True
        self._fail_all("The worker's engine was closed.")
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if self._responses is not None:
            self._responses.cancel()
            tasks.append(self._responses)
        if tasks:
            await asyncio.wait(tasks)
        await self._thread.end()
        self._watch.stop()
