"""Requests on their way through vLLM; new tokens go to their sinks as messages come.

An aborted request gets no last output: the core carries out what it gets in order, so when it
has answered a question that came after the abort, the request is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.gate import Gate
from millstream_server.engines.open_request import OpenRequest
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.engines.vllm.media import media_features
from millstream_server.engines.vllm.metrics import VllmMetrics
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
from millstream_server.engines.vllm.withdrawal import Withdrawals
from millstream_server.generation.output import Finish
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    EngineFailedError,
    InternalError,
    KvTransferError,
    ServingError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_TENTHS = 10


@dataclass(slots=True, eq=False, kw_only=True)
class Run(OpenRequest):
    """One request on its way through vLLM; its task prepares and sends it."""

    core_id: str
    """Its id at vLLM."""
    transfer: dict[str, Any] = field(default_factory=dict)
    """vLLM's parameters of its hand-off."""
    sent: bool = False
    progress: Progress = field(default_factory=Progress)


class Runs:
    """All open requests of an engine. All calls come from one event loop."""

    def __init__(self, role: Role, timeout_s: float, lose: Callable[[str], None]) -> None:
        """``lose`` is called when vLLM ends; `start` before the first `launch`.

        ``timeout_s``: how long decode waits for a KV cache, once it has room.
        """
        self.gate = Gate()
        """Why vLLM's scheduler stands still, if it does: requests wait there, where aborts reach
        them. Hand-offs may take longer then."""
        self.adapters: dict[str, Any] = {}
        """vLLM's requests of loaded LoRA adapters, by name."""
        self.outputs = Outputs(self._received, lose)
        self._role = role
        self._timeout_s = timeout_s
        self._built: BuiltEngine | None = None
        self._by_id: dict[str, Run] = {}
        self._at_core: dict[str, Run] = {}
        self._to_abort: list[Run] = []
        self._aborter: asyncio.Task[None] | None = None
        self._withdrawals: Withdrawals | None = None

    def start(self, built: BuiltEngine, metrics: VllmMetrics | None) -> None:
        """Use this engine from now on."""
        self._built = built
        if built.channel is not None and built.channel.is_written_to:
            self._withdrawals = Withdrawals(built.client)
        self.outputs.start(built, metrics)

    def __contains__(self, engine_id: str) -> bool:
        """Return whether a request of this id is open."""
        return engine_id in self._by_id

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._by_id)

    def __iter__(self) -> Iterator[Run]:
        """Return the open requests, oldest first."""
        return iter(self._by_id.values())

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
            message = await _message(self._built, run, self._role, self.adapters)
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

    def _forget(self, run: Run) -> None:
        known = self._by_id.pop(run.request.engine_id, None)
        self._at_core.pop(run.core_id, None)
        self.outputs.forget(run.core_id)
        if known and self._withdrawals is not None and run.transfer and not run.progress.emitted:
            self._withdrawals.add(run.core_id, run.transfer)  # its KV cache may not have come

    def _wait_for_peer(self, run: Run, waited: int = 0) -> None:
        """End a decode leg whose KV cache doesn't come: vLLM would wait for ever.

        ``waited``: tenths of the limit for which nothing has been queued, as it may be itself.
        """

        def look() -> None:
            if run.over or run.progress.emitted:
                return
            queued = any(stats.num_waiting_reqs for stats in self.outputs.stats.values())
            tenths = 0 if queued or not self.gate.is_open else waited + 1
            if tenths < _TENTHS:
                self._wait_for_peer(run, tenths)
                return
            run.failed_by_us = KvTransferError("The KV cache didn't come from prefill in time.")
            self.abort(run.request.engine_id)

        run.timer = asyncio.get_running_loop().call_later(self._timeout_s / _TENTHS, look)

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
            run.pause_out()

    def uses(self, adapter: str) -> bool:
        """Return whether an open request uses a LoRA adapter."""
        return any(run.request.adapter == adapter for run in self._by_id.values())

    def fail_all(self, message: str) -> None:
        """End all requests with `EngineFailedError`: the engine is gone."""
        if self._withdrawals is not None:
            self._withdrawals.close()
            self._withdrawals = None
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
        result = _result(self._built, run, output)
        if isinstance(result, ServingError):
            log.warning(
                "vLLM failed a request",
                engine_id=run.request.engine_id,
                reason=str(output.finish_reason),
            )
        run.end(result)

    async def close(self) -> None:
        """Stop reading; the requests were ended before."""
        if self._aborter is not None:
            self._aborter.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._aborter
        await self.outputs.close()


async def _message(built: BuiltEngine, run: Run, role: Role, adapters: Mapping[str, Any]) -> Any:
    """Make vLLM's request; what takes long is done in threads."""
    request = run.request
    if request.sampling.constraint is not None:
        params = await asyncio.to_thread(sampling_params, built, request, role, run.transfer)
    else:
        params = sampling_params(built, request, role, run.transfer)
    features: Sequence[Any] = ()
    if request.prompt.media:  # it reads every number
        features = await asyncio.to_thread(media_features, built, request, role)
    adapter = None
    if request.adapter and (adapter := adapters.get(request.adapter)) is None:
        raise AdapterNotFoundError(
            f"The LoRA adapter {request.adapter!r} isn't loaded on this worker."
        )
    return core_request(built, request, run.core_id, params, adapter=adapter, features=features)


def _result(built: BuiltEngine, run: Run, output: Any) -> Finish | ServingError:
    """Make the end from a request's last output."""
    data = None
    if built.channel is not None and run.transfer:
        try:
            data = built.channel.finished(run.request, output.kv_transfer_params)
        except ServingError as error:
            return error
    return conclude(output, run.request, run.progress, data)
