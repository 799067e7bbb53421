"""Text requests on a link: one stream per connection, requests in slots, frames to sinks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc

from millstream.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    diffusion_pb2,
    diffusion_pb2_grpc,
    generation_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from millstream_server.engines.base import Role
from millstream_server.generation.logprobs import LogprobColumns
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.stream_metrics import stream_metrics
from millstream_server.links.link import Connection
from millstream_server.links.open_request import (
    DISCARD,
    OpenRequest,
    not_asked_for,
    pending_tokens,
    place_of,
)
from millstream_server.links.outbox import BatchOutbox, Outbox, SingleOutbox
from millstream_server.protobuf import generation as convert
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    NoWorkerError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.telemetry.client_rpcs import observe_call
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_GATHER_S = 0.001
"""Least time between two messages to a worker while several requests are in flight: a message costs
each end some 50 us, whatever it holds."""
_UNLOADED_S = 0.1
"""After this the Processor knows which adapters a worker has unloaded."""
_MOST_FRAME_TOKENS = 1 << 19
"""Workers send 3 MiB at once, which are 315,000 tokens. So many take 0.3 s, and all else waits."""
_LOGPROBS_AT_ONCE = 1024
"""Entries with logprobs that are read in one turn of the event loop, in 10 ms."""
_MOST_LATE_TOKENS = 1 << 16
"""What a worker may send for a request after its budget, until it has got the cancel."""


@dataclass(frozen=True, slots=True)
class _Rpc:
    """The RPC of one role."""

    service: str
    method: str
    request: Callable[[], Any]
    stub: Callable[[grpc.aio.Channel], Any]


_DECODE = _Rpc("Decode", "Decode", decode_pb2.DecodeRequest, decode_pb2_grpc.DecodeServiceStub)
_RPCS = {
    Role.AGGREGATED: _DECODE,
    Role.DECODE: _DECODE,
    Role.PREFILL: _Rpc(
        "Prefill", "Prefill", prefill_pb2.PrefillRequest, prefill_pb2_grpc.PrefillServiceStub
    ),
    Role.DIFFUSION: _Rpc(
        "Diffusion",
        "GenerateText",
        diffusion_pb2.GenerateTextRequest,
        diffusion_pb2_grpc.DiffusionServiceStub,
    ),
}


class GenerationStream:
    """The stream of one connection to a worker; the link's `AbilityCalls` for text.

    A request uses a slot from `start` to its end. The slot is free again when the end has arrived,
    not when it is cancelled: until then the worker may still send tokens for it.

    A worker that sends a request more tokens than `max_new_tokens` loses this request. Whatever
    else breaks the protocol ends the connection, and with it every request of the worker.
    """

    def __init__(self, connection: Connection) -> None:
        """Prepare; `run` opens the stream."""
        self._rpc = _RPCS[connection.description.role]
        self.health_service = f"millstream.v1.{self._rpc.service}Service"
        self._connection = connection
        self._view = connection.view
        self._metrics = stream_metrics(connection.description.role)
        self._sinks: list[OutputSink | None] = []
        """By slot; a request's `OpenRequest` until its first token."""
        self._requests: list[OpenRequest | None] = []
        """By slot, too."""
        self._left: list[int] = []
        """By slot, too: the tokens that its request may still get; below 0, it got too many."""
        self._free: list[int] = []
        self._finishing = False
        batched = connection.description.batched_controls
        self._outbox: Outbox = (BatchOutbox if batched else SingleOutbox)(self._rpc.request)

    # ---- for callers -----------------------------------------------------------------------------

    def start(self, request: GenerationRequest, sink: OutputSink) -> Callable[[], None]:
        """Start a request; its output goes to ``sink``. Return the function that cancels it.

        It may be cancelled at any time, also twice and after the end. The sink gets exactly one
        terminal call, whatever happens to the worker.
        """
        free = self._free
        slot = free[-1] if free else len(self._sinks)
        self._outbox.start(slot, request)  # first: if it raises, no slot is used
        view = self._view
        tokens = pending_tokens(self._connection.description.role, request)
        opened = OpenRequest(
            self._sinks, slot, sink, view, place_of(view, request), tokens, len(request.prompt)
        )
        if free:
            free.pop()
            self._sinks[slot] = self._requests[slot] = opened
            self._left[slot] = request.sampling.max_new_tokens
        else:
            self._sinks.append(opened)
            self._requests.append(opened)
            self._left.append(request.sampling.max_new_tokens)
        opened.begin()
        self._metrics.begun()
        return functools.partial(self._cancel, opened)

    def _cancel(self, opened: OpenRequest) -> None:
        slot = opened.slot
        open_ = slot < len(self._requests) and self._requests[slot] is opened
        if open_ and not opened.cancelled:
            opened.cancelled = True
            self._view.in_use -= 1
            self._outbox.cancel(slot)

    # ---- for the link ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the worker ends the stream, as it also does after `finish`.

        Raises:
            ExceptionGroup: the stream broke, or the worker broke the protocol.
        """
        call = self._open()
        async with asyncio.TaskGroup() as group:
            writer = group.create_task(self._write(call))
            try:
                while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    frame = response.frame
                    columns = await self._columns(frame) if frame.logprobs else None
                    self._dispatch(frame, columns)
            finally:
                writer.cancel()
                call.cancel()

    def finish(self) -> None:
        """Close the sending side as soon as no request is open; the worker then ends the stream."""
        self._finishing = True
        self._outbox.filled.set()

    def close(self) -> None:
        """Fail every request that is open."""
        sinks, self._sinks, self._requests, self._left = self._sinks, [], [], []
        self._view.lost()
        for sink in sinks:
            if sink is not None:
                self._fail(
                    sink,
                    WorkerLostError("the worker that ran this request went away; send it again"),
                )

    def _open(self) -> Any:
        call = getattr(self._rpc.stub(self._connection.channel), self._rpc.method)()
        observe_call(call, f"{self.health_service}/{self._rpc.method}")
        return call

    async def _write(self, call: Any) -> None:
        outbox = self._outbox
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            while True:
                while (message := outbox.take()) is not None:
                    await call.write(message)
                    if self._view.in_flight > 1:
                        await asyncio.sleep(_GATHER_S)
                if self._finishing and not self._view.in_flight:
                    await call.done_writing()
                    return
                outbox.filled.clear()
                await outbox.filled.wait()

    # ---- the token path: once per frame, then once per entry -------------------------------------

    def _dispatch(
        self, frame: generation_pb2.StepFrame, columns: dict[int, LogprobColumns] | None = None
    ) -> None:
        found, entries = len(frame.token_ids), len(frame.slots)
        if entries > found or found > _MOST_FRAME_TOKENS:
            self._broken(f"sent {entries} entries and {found} tokens in a frame")
        token_ids = frame.token_ids[:]  # a list: several times faster to read than the field
        self._metrics.frame(len(token_ids))
        if columns is not None:
            self._dispatch_with_logprobs(frame, columns)
        else:
            self._dispatch_tokens(frame, token_ids)
        if frame.draining:
            self._connection.on_draining()
        # Converted first: if that raises, no slot must have been released.
        for finish in frame.finishes:
            self._check_prompt(finish)
            end = convert.finish_from_proto(finish)
            sink = self._release(finish.slot)
            try:
                sink.finish(end)
            except Exception as fault:  # noqa: BLE001 - one sink must not end the others
                self._report(fault)
            self._metrics.ended(end.reason.name)
        for failure in frame.errors:
            error = _seen_from_here(error_from_proto(failure.error))
            self._fail(self._release(failure.slot), error)

    def _dispatch_tokens(self, frame: generation_pb2.StepFrame, token_ids: list[int]) -> None:
        sinks: Any = self._sinks
        left = self._left
        if not frame.token_counts:
            for slot, token in zip(frame.slots[:], token_ids, strict=True):
                left[slot] -= 1
                if left[slot] >= 0:
                    sinks[slot].emit((token,))
                else:
                    self._over_budget(slot)
            return
        at = 0
        for slot, count in zip(frame.slots[:], self._counts(frame), strict=True):
            left[slot] -= count
            if left[slot] >= 0:
                sinks[slot].emit(token_ids[at : at + count])
            else:
                self._over_budget(slot)
            at += count

    async def _columns(self, frame: generation_pb2.StepFrame) -> dict[int, LogprobColumns]:
        """Read a frame's logprobs, by slot; after many of them let others run."""
        if len(frame.logprobs) > len(frame.slots):
            self._broken(f"sent {len(frame.logprobs)} logprobs for {len(frame.slots)} entries")
        columns: dict[int, LogprobColumns] = {}
        for number, entry in enumerate(frame.logprobs, 1):
            found = convert.logprobs_from_proto(entry.tokens)
            if entry.slot in columns:
                columns[entry.slot].extend(found)
            else:
                columns[entry.slot] = found
            if not number % _LOGPROBS_AT_ONCE:
                await asyncio.sleep(0)
        return columns

    def _dispatch_with_logprobs(
        self, frame: generation_pb2.StepFrame, columns: dict[int, LogprobColumns]
    ) -> None:
        sinks: Any = self._sinks
        tokens: dict[int, list[int]] = {}
        token_ids, at = frame.token_ids[:], 0
        counts = self._counts(frame) or [1] * len(frame.slots)
        for slot, count in zip(frame.slots[:], counts, strict=True):
            tokens.setdefault(slot, []).extend(token_ids[at : at + count])
            at += count
        for slot, fresh in tokens.items():
            own = columns.get(slot, ())
            if own and len(own) != len(fresh):
                self._broken(f"sent {len(fresh)} tokens and {len(own)} logprobs for slot {slot}")
            self._left[slot] -= len(fresh)
            if self._left[slot] >= 0:
                sinks[slot].emit(fresh, own)
            else:
                self._over_budget(slot)

    def _counts(self, frame: generation_pb2.StepFrame) -> list[int]:
        counts = frame.token_counts[:]
        if 0 in counts:  # they use no budget: there could be any number of them
            self._broken("sent an entry without tokens")
        return counts

    def _over_budget(self, slot: int) -> None:
        """Fail a request that got too many tokens, once; none of them is passed on."""
        opened = self._requests[slot]
        if opened is None:
            self._broken(f"sent tokens for slot {slot}, which is not in use")
        elif opened.sink is DISCARD:
            if self._left[slot] < -_MOST_LATE_TOKENS:
                self._broken(f"goes on with slot {slot} after its budget")
        else:
            sink = opened.sink
            self._sinks[slot] = opened.sink = DISCARD
            try:
                sink.fail(not_asked_for(self._view.address, "more tokens than max_new_tokens"))
            except Exception as fault:  # noqa: BLE001 - one sink must not end the others
                self._report(fault)
            self._cancel(opened)

    def _check_prompt(self, finish: generation_pb2.SlotFinish) -> None:
        """Check the size of a prompt's logprobs."""
        if not finish.HasField("prompt_logprobs"):
            return
        opened, found = self._requests[finish.slot], len(finish.prompt_logprobs.token_ids)
        if opened is not None and found > opened.prompt_tokens:
            self._broken(f"sent logprobs of {found} prompt tokens, of {opened.prompt_tokens}")

    def _broken(self, what: str) -> NoReturn:
        """End the connection: the worker has broken the protocol."""
        message = f"worker {self._view.address} {what}"
        raise RuntimeError(message)

    def _fail(self, sink: OutputSink, error: ServingError) -> None:
        try:
            sink.fail(error)
        except Exception as fault:  # noqa: BLE001 - one sink must not end the others
            self._report(fault)
        self._metrics.ended(error.reason)

    def _report(self, fault: Exception) -> None:
        """Log that a sink raised; it must not end the stream's other requests."""
        log.error("a request's end failed", worker=self._view.address, error=fault)

    def _release(self, slot: int) -> OutputSink:
        opened = self._requests[slot]
        if opened is None:
            self._broken(f"ended slot {slot}, which is not in use")
        self._sinks[slot] = self._requests[slot] = None
        self._left[slot] = 0
        self._free.append(slot)
        opened.end()
        if self._finishing:
            self._outbox.filled.set()
        return opened.sink


def _seen_from_here(error: ServingError) -> ServingError:
    """Return what a worker's refusal means here: requests go to workers that have their adapter.

    Another one may still have it. If none has, the next attempt is refused for that.
    """
    if isinstance(error, AdapterNotFoundError):
        return NoWorkerError(
            "the worker for this request has just unloaded its LoRA adapter; retry",
            retry_delay_s=_UNLOADED_S,
        )
    return error
