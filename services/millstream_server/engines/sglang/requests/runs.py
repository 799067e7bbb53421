"""Requests on their way through SGLang: one task for each drives `async_generate`.

The task gets the end, and what `requests.batches` leaves; other tokens come from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import partial

from millstream_server.control.engine import Role
from millstream_server.engines.gate import Gate, Hold
from millstream_server.engines.open_request import OpenRequest
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.dllm import BlockBudget
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.engines.sglang.requests.batches import BatchReader
from millstream_server.engines.sglang.requests.media import keep_steps_apart, media_arguments
from millstream_server.engines.sglang.requests.translate import (
    Chunk,
    cancelled,
    conclude,
    read_chunk,
    translate_exception,
)
from millstream_server.generation.output import TokenLogprob
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    EngineFailedError,
    InternalError,
    KvTransferError,
    ServingError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class Run(OpenRequest):
    """One request on its way through SGLang."""

    arguments: dict[str, object]
    started: bool = False
    preparing: bool = False
    """It waits for KV cache, for the gate, or for its media: SGLang doesn't know it yet."""
    taken: int = 0
    """Tokens SGLang has handed over."""
    on_computed: Callable[[], None] | None = None
    """Prefill: called with its one token, which is the decode engine's; None: tokens are for the
    sink."""

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        self.taken += len(token_ids)
        if not token_ids or self.over:
            return
        if self.on_computed is None:
            self.sink.emit(token_ids, logprobs)
        else:
            self.on_computed()

    def give_up(self, error: Exception) -> None:
        log.error("a request's output was refused", engine_id=self.request.engine_id, error=error)
        self.end(InternalError("The worker failed to pass on the request's output."))
        if self.task is not None:
            self.task.cancel()


class Runs:
    """All open requests of an engine. All calls come from one event loop."""

    def __init__(self, config: SglangEngineConfig, progress: RankProgress) -> None:
        """Start without any; `start` before the first `launch`."""
        self.gate = Gate()
        """SGLang has none for all operations: it would run a request with memory that is released,
        and one that waits in its own pause can't be aborted."""
        self.adapters: set[str] = set()
        """Names of adapters that requests may use: SGLang loads one that was unloaded again."""
        self.blocks: BlockBudget | None = None
        """Of a diffusion language model."""
        self._role = config.role
        self._transfer_s = config.transfer_timeout_s
        self._progress = progress
        self._built: BuiltEngine | None = None
        self._batches: BatchReader | None = None
        self._runs: dict[str, Run] = {}

    def start(self, built: BuiltEngine) -> None:
        """Use this engine from now on."""
        self._built = built
        manager = built.engine.tokenizer_manager
        self._batches = BatchReader(manager, self._runs, self._progress)
        keep_steps_apart(getattr(manager, "mm_processor", None))

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def at_engine(self) -> list[Run]:
        """Return the requests that SGLang knows or is about to get."""
        return [run for run in self._runs.values() if run.started and not run.preparing]

    def tasks(self) -> Iterable[asyncio.Task[None]]:
        return [run.task for run in self._runs.values() if run.task is not None]

    def launch(self, run: Run) -> None:
        """Start a request, whose id is new."""
        if self._role is Role.PREFILL:
            run.on_computed = partial(self._transfers, run)
        self._runs[run.request.engine_id] = run
        run.task = asyncio.create_task(self._drive(run), name=f"sglang-{run.request.engine_id}")

    async def _drive(self, run: Run) -> None:
        run.started = True
        try:
            if run.aborted:
                run.end(cancelled(run.request))
            elif not run.over:
                run.preparing = True
                async with self.blocks.room(run.request) if self.blocks else nullcontext():
                    await self._stream(run)
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

    async def _stream(self, run: Run) -> None:
        await self._prepare(run)
        assert self._built is not None  # noqa: S101 - `start` comes first
        stream = await self._built.engine.async_generate(**run.arguments)
        async with aclosing(stream):
            async for raw in stream:
                chunk = read_chunk(raw)
                run.take(chunk.token_ids, chunk.logprobs)
                self._progress.note(raw)
                if chunk.finish_reason is not None:
                    self._conclude(run, chunk)
        run.end(InternalError("The engine ended the request without a reason."))

    async def _prepare(self, run: Run) -> None:
        if media := run.request.prompt.media:  # in a thread: it reads every number
            found = await asyncio.to_thread(media_arguments, media, self._role)
            run.arguments.update(found)
        await self.gate.passed()
        if (name := run.request.adapter) and name not in self.adapters:
            raise AdapterNotFoundError(f"The LoRA adapter {name!r} isn't loaded on this worker.")
        run.preparing = False

    def _transfers(self, run: Run) -> None:
        """End a leg whose prompt is computed if its KV cache isn't transferred in time."""

        def late() -> None:
            if not self.gate.is_open:
                self._transfers(run)
                return
            run.end(KvTransferError("The KV cache could not be handed over to decode in time."))
            self.abort(run.request.engine_id)

        run.timer = asyncio.get_running_loop().call_later(self._transfer_s, late)

    def _conclude(self, run: Run, chunk: Chunk) -> None:
        result = conclude(chunk, run.request, emitted=self._reported(run), aborted=run.aborted)
        if isinstance(result, ServingError):
            log.warning(
                "SGLang failed a request",
                engine_id=run.request.engine_id,
                reason=str(chunk.finish_reason),
            )
        run.end(result)

    def _reported(self, run: Run) -> int:
        """Count the tokens the sink got: a prefill engine's one token is the decode engine's."""
        return 0 if self._role is Role.PREFILL else run.taken

    def abort(self, engine_id: str) -> None:
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
        if not state.dispatched:
            # SGLang would send the abort ahead of the request and never send it again.
            run.task.cancel()
            return
        manager.abort_request(engine_id)
        if self.gate.holds(Hold.PAUSED):
            # A request that is paused in place is let go of with the next step: its client needn't
            # wait for that.
            run.end(cancelled(run.request, emitted=self._reported(run)))

    def pause_out(self) -> None:
        """End all requests with `WorkerPausedError`."""
        for engine_id, run in list(self._runs.items()):
            run.pause_out()
            self.abort(engine_id)

    def fail_all(self, message: str) -> None:
        """End all requests with `EngineFailedError`: the engine is gone."""
        for run in list(self._runs.values()):
            run.end(EngineFailedError(message))
            if run.task is not None and run.started:
                run.task.cancel()
