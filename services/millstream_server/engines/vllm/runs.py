"""Requests on their way through vLLM; new tokens go to their sinks as messages come.

An aborted request gets no last output: the core carries out what it gets in order, so when it
has answered a question that came after the abort, the request is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import EngineLoad, RankLoad, Role
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.media import media_features
from millstream_server.engines.vllm.outputs import Outputs
from millstream_server.engines.vllm.translate import (
    Progress,
    cancelled,
    conclude,
    core_request,
    read_logprobs,
    read_prompt_logprobs,
    sampling_params,
)
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    EngineFailedError,
    InternalError,
    KvTransferError,
    ServingError,
    WorkerPausedError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_PAUSED_S = 1.0
"""After this time a client may retry what a pause has ended."""


@dataclass(slots=True, eq=False)
class Run:
    """One request on its way through vLLM."""

    request: GenerationRequest
    sink: OutputSink
    core_id: str
    """Its id at vLLM."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """vLLM's parameters of its hand-off."""
    task: asyncio.Task[None] | None = None
    """Prepares and sends it."""
    sent: bool = False
    aborted: bool = False
    failed_by_us: ServingError | None = None
    """Why we have aborted it, if the caller didn't ask for that."""
    over: bool = False
    progress: Progress = field(default_factory=Progress)
    timer: asyncio.TimerHandle | None = None
    """Decode: ends the wait for prefill."""

    def end(self, result: Finish | ServingError) -> None:
        """Report the end, unless it was reported."""
        if self.over:
            return
        self.over = True
        if self.timer is not None:
            self.timer.cancel()
        if isinstance(result, ServingError):
            self.sink.fail(result)
        elif result.reason is FinishReason.CANCELLED and self.failed_by_us is not None:
            self.sink.fail(self.failed_by_us)
        else:
            self.sink.finish(result)


class Runs:
    """All open requests of an engine. All calls come from one event loop."""

    def __init__(self, role: Role, transfer_timeout_s: float, lose: Callable[[str], None]) -> None:
        """``lose`` is called when vLLM ends; `start` before the first `launch`."""
        self.paused = False
        """Whether an operator has paused it: hand-offs may take longer then."""
        self.adapters: dict[str, Any] = {}
        """vLLM's requests of loaded LoRA adapters, by name."""
        self.outputs = Outputs(self._received, lose)
        self._role = role
        self._timeout_s = transfer_timeout_s
        self._built: BuiltEngine | None = None
        self._by_id: dict[str, Run] = {}
        self._at_core: dict[str, Run] = {}
        self._to_abort: list[Run] = []
        self._aborter: asyncio.Task[None] | None = None

    def start(self, built: BuiltEngine) -> None:
        """Use this engine from now on."""
        self._built = built
        self.outputs.start(built)

    def __contains__(self, engine_id: str) -> bool:
        """Return whether a request of this id is open."""
        return engine_id in self._by_id

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._by_id)

    # ---- requests --------------------------------------------------------------------------------

    def launch(self, run: Run) -> None:
        """Start a request, whose ids are new."""
        self._by_id[run.request.engine_id] = run
        run.task = asyncio.create_task(self._send(run), name=f"vllm-{run.request.engine_id}")
        if run.transfer and self._role is Role.DECODE:
            self._wait_for_peer(run)

    async def _send(self, run: Run) -> None:
        assert self._built is not None  # noqa: S101 - `start` comes first
        try:
            message = await self._prepared(self._built, run)
            if run.aborted or run.over:
                self._forget(run)
                run.end(cancelled(run.request, run.progress))
                return
            self._at_core[run.core_id] = run
            run.sent = True
            await self._built.client.add_request_async(message)
        except asyncio.CancelledError:
            self._forget(run)
            run.end(cancelled(run.request, run.progress))
        except ServingError as error:
            self._forget(run)
            run.end(error)
        except Exception as error:  # noqa: BLE001 - the vendor's seam: anything may come
            log.warning("vLLM refused a request", engine_id=run.request.engine_id, error=error)
            self._forget(run)
            run.end(InternalError("The engine could not take the request."))

    async def _prepared(self, built: BuiltEngine, run: Run) -> Any:
        request = run.request
        if request.sampling.constraint is not None:
            params = await asyncio.to_thread(
                sampling_params, built, request, self._role, run.transfer
            )
        else:
            params = sampling_params(built, request, self._role, run.transfer)
        features: Sequence[Any] = ()
        if request.prompt.media:  # in a thread: it reads every number
            features = await asyncio.to_thread(media_features, built, request, self._role)
        adapter = None
        if request.adapter and (adapter := self.adapters.get(request.adapter)) is None:
            raise AdapterNotFoundError(
                f"The LoRA adapter {request.adapter!r} isn't loaded on this worker."
            )
        return core_request(built, request, run.core_id, params, adapter=adapter, features=features)

    def _forget(self, run: Run) -> None:
        self._by_id.pop(run.request.engine_id, None)
        self._at_core.pop(run.core_id, None)

    def _wait_for_peer(self, run: Run) -> None:
        """End a decode leg whose prefill doesn't come: vLLM would wait for ever."""

        def late() -> None:
            if run.over or run.progress.emitted:
                return
            if self.paused or any(stats.num_waiting_reqs for stats in self.outputs.stats.values()):
                self._wait_for_peer(run)  # it may still be queued itself
                return
            run.failed_by_us = KvTransferError("The KV cache didn't come from prefill in time.")
            self.abort(run.request.engine_id)

        run.timer = asyncio.get_running_loop().call_later(self._timeout_s, late)

    # ---- aborts ----------------------------------------------------------------------------------

    def abort(self, engine_id: str) -> None:
        """Stop a request; see `Generator.abort`."""
        run = self._by_id.get(engine_id)
        if run is None or run.aborted:
            return
        run.aborted = True
        if not run.sent:
            if run.task is not None and run.request.prompt.media:
                run.task.cancel()
            return  # else `_send` looks at the flag
        self._to_abort.append(run)
        if self._aborter is None or self._aborter.done():
            self._aborter = asyncio.create_task(self._abort_all(), name="vllm-aborts")

    async def _abort_all(self) -> None:
        assert self._built is not None  # noqa: S101 - `start` comes first
        client = self._built.client
        while self._to_abort:
            runs, self._to_abort = self._to_abort, []
            try:
                for run in runs:  # their requests must be on the way before
                    if run.task is not None:
                        await asyncio.wait({run.task})
                await client.abort_requests_async([run.core_id for run in runs])
                await self.outputs.barrier()
            except Exception as error:  # noqa: BLE001 - it is dead; `_read` learns it too
                log.warning("vLLM didn't take an abort", error=error)
                return
            for run in runs:
                self._forget(run)
                run.end(cancelled(run.request, run.progress))

    def pause_out(self) -> None:
        """Say that a pause ends what vLLM has; it sends the end of each."""
        for run in self._at_core.values():
            run.failed_by_us = WorkerPausedError(
                "An operator paused this worker.", retry_delay_s=_PAUSED_S
            )

    def uses(self, adapter: str) -> bool:
        """Return whether an open request uses a LoRA adapter."""
        return any(run.request.adapter == adapter for run in self._by_id.values())

    def fail_all(self, message: str) -> None:
        """End all requests with `EngineFailedError`: the engine is gone."""
        for run in list(self._by_id.values()):
            self._forget(run)
            if run.task is not None and not run.sent:
                run.task.cancel()
            run.end(EngineFailedError(message))

    # ---- output ----------------------------------------------------------------------------------

    def _received(self, output: Any, version: str) -> None:
        run = self._at_core.get(output.request_id)
        if run is None:
            return
        try:
            self._take(run, output, version)
        except Exception as error:  # noqa: BLE001 - it would end all requests
            log.error(
                "a request's output was refused", engine_id=run.request.engine_id, error=error
            )
            run.failed_by_us = InternalError("The worker failed to pass on the request's output.")
            self.abort(run.request.engine_id)

    def _take(self, run: Run, output: Any, version: str) -> None:
        progress, request = run.progress, run.request
        progress.weight_version = version
        if (stats := output.prefill_stats) is not None:
            # What came from prefill isn't cached: prefill has told what was, there.
            decode = self._role is Role.DECODE
            progress.cached = stats.num_local_cached_tokens if decode else stats.num_cached_tokens
        if (tensors := output.new_prompt_logprobs_tensors) is not None and request.logprobs:
            progress.prompt_logprobs += read_prompt_logprobs(tensors, request.logprobs.top)
        # A prefill engine's one token is computed by decode again, and that one counts.
        if output.new_token_ids and self._role is not Role.PREFILL and not run.over:
            progress.emitted += len(output.new_token_ids)
            if request.logprobs is not None and output.new_logprobs is not None:
                run.sink.emit(
                    output.new_token_ids, read_logprobs(output.new_logprobs, request.logprobs.top)
                )
            else:
                run.sink.emit(output.new_token_ids)
        if output.finish_reason is not None:
            self._conclude(run, output)

    def _conclude(self, run: Run, output: Any) -> None:
        assert self._built is not None  # noqa: S101 - `start` comes first
        self._forget(run)
        if str(output.finish_reason) == "abort" and (run.aborted or run.failed_by_us):
            run.end(cancelled(run.request, run.progress))
            return
        try:
            channel = self._built.channel
            data = (
                channel.finished(run.request, output.kv_transfer_params)
                if channel is not None and run.transfer
                else None
            )
            result = conclude(output, run.request, run.progress, data)
        except ServingError as error:
            result = error
        if isinstance(result, ServingError):
            log.warning(
                "vLLM failed a request",
                engine_id=run.request.engine_id,
                reason=str(output.finish_reason),
            )
        run.end(result)

    # ---- load and end ----------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        """Return the load as of each rank's last step.

        vLLM takes one more step after its last request, and steps while blocks are kept for decode:
        so an idle rank has told that its blocks are back.
        """
        assert self._built is not None  # noqa: S101 - `start` comes first
        built = self._built
        ranks = [self._of_rank(rank, built.rank_blocks) for rank in range(built.ranks)]
        running = sum(load.running_requests for load in ranks)
        queued = sum(load.queued_requests for load in ranks)
        # Those on their way to a rank are in no message yet.
        coming = max(0, len(self._by_id) - running - queued)
        if len(ranks) == 1:
            (only,) = ranks
            ranks = [
                RankLoad(
                    running_requests=only.running_requests,
                    queued_requests=queued + coming,
                    queued_tokens=self._queued_tokens(queued + coming),
                    used_blocks=only.used_blocks,
                    total_blocks=only.total_blocks,
                )
            ]
        return EngineLoad(
            running_requests=running,
            queued_requests=queued + coming,
            used_blocks=sum(load.used_blocks for load in ranks),
            total_blocks=sum(load.total_blocks for load in ranks),
            ranks=tuple(ranks),
        )

    def _of_rank(self, rank: int, blocks: int) -> RankLoad:
        stats = self.outputs.stats.get(rank)
        if stats is None:
            return RankLoad(
                running_requests=0, queued_requests=0, used_blocks=0, total_blocks=blocks
            )
        running = min(stats.num_running_reqs, len(self._by_id))
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        return RankLoad(
            running_requests=running,
            queued_requests=min(waiting, len(self._by_id) - running),
            used_blocks=round(stats.kv_cache_usage * blocks),
            total_blocks=blocks,
        )

    def _queued_tokens(self, queued: int) -> int:
        """Return the prompt tokens of the requests that have had no output yet."""
        if not queued:
            return 0
        waiting = [run for run in self._by_id.values() if not run.progress.emitted]
        return sum(len(run.request.token_ids) for run in waiting[-queued:])

    async def close(self) -> None:
        """Stop reading; the requests were ended before."""
        if self._aborter is not None:
            self._aborter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._aborter
        await self.outputs.close()
