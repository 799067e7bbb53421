"""Text requests on a link: step frames to sinks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from millstream.v1 import decode_pb2, diffusion_pb2, generation_pb2, prefill_pb2
from millstream_server.control.engine import Role
from millstream_server.generation import wire as convert
from millstream_server.generation.output import LogprobColumns, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.channel import rpc_of
from millstream_server.links.slot_stream import Connection, OpenRequest, SlotStream
from millstream_server.links.unread import not_asked_for
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.routing.workers import Place
from millstream_server.runtime.errors import AdapterNotFoundError, NoWorkerError, ServingError
from millstream_server.runtime.telemetry.counts import stream_metrics

_UNLOADED_S = 0.1
"""After this the Processor knows which adapters a worker has unloaded."""
_MAX_BATCH_TOKENS = 1 << 18
"""Most prompt tokens of one message, so that it stays far below a worker's limit of 32 MiB."""
_MOST_FRAME_TOKENS = 1 << 19
"""Workers send 3 MiB at once, which are 315,000 tokens. So many take 0.3 s, and all else waits."""
_ENTRIES_AT_ONCE = 1024
"""Entries of a frame that are passed on in one turn of the event loop, in about 2 ms, as much as
clients' bytes have: thousands of requests would leave no time for those, cancels included."""
_LOGPROBS_AT_ONCE = 1024
"""Entries with logprobs that are read in one turn of the event loop, in 10 ms."""
_MOST_LATE_TOKENS = 1 << 16
"""What a worker may send for a request after its budget, until it has got the cancel."""

_DECODE = rpc_of(decode_pb2.DESCRIPTOR, "DecodeService/Decode")
_RPCS = {
    Role.AGGREGATED: _DECODE,
    Role.DECODE: _DECODE,
    Role.PREFILL: rpc_of(prefill_pb2.DESCRIPTOR, "PrefillService/Prefill"),
    Role.DIFFUSION: rpc_of(diffusion_pb2.DESCRIPTOR, "DiffusionService/GenerateText"),
}


class OpenGeneration(OpenRequest):
    """A text request on a worker.

    It stands in for the request's sink until the first token, and then puts the sink in its place:
    later tokens take the same way as without it.
    """

    __slots__ = ("prompt_tokens", "request_id", "sink")
    _stream: GenerationStream

    def __init__(
        self,
        stream: GenerationStream,
        slot: int,
        place: Place,
        request: GenerationRequest,
        sink: OutputSink,
    ) -> None:
        """Use `GenerationStream.start` to make one."""
        self.prompt_tokens = tokens = len(request.prompt)
        pending = max(tokens - request.expected_cached_tokens, 1) if stream.prefills else 0
        OpenRequest.__init__(self, stream, slot, place, pending)  # super() takes 0.2 us
        self.request_id = request.request_id
        """The same for all choices of a request."""
        self.sink: OutputSink | None = sink
        """None: it has failed here or was abandoned, and its worker has not ended it yet."""

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Pass the first tokens on: the prompt is computed."""
        sink: Any = self.sink
        self._stream.sinks[self.slot] = sink
        self._stream.view.computed(self.place, self.pending_tokens)
        self.pending_tokens = 0
        sink.emit(token_ids, logprobs)

    def fail(self, error: ServingError) -> None:
        if self.sink is not None:
            self.sink.fail(error)

    def abandon(self) -> None:
        """Cancel it; what its worker still sends, its end included, goes nowhere."""
        self._stream.abandon(self)


class GenerationStream(SlotStream[OpenGeneration]):
    """The stream of text requests.

    A worker that sends a request more tokens than `max_new_tokens` loses this request.
    """

    gather_s = 0.001
    """A message costs each end some 50 us, whatever it holds."""

    def __init__(self, connection: Connection) -> None:
        worker = connection.description
        self._metrics = stream_metrics(worker.role.value)
        super().__init__(connection, _RPCS[worker.role], self._metrics)
        self.prefills = worker.role is not Role.DECODE
        self._batched = worker.batched_controls
        self._batch_tokens = 0
        """Prompt tokens in the message that was added last."""
        self.sinks: list[Any] = []
        """By slot: the request's `OutputSink`, until its first token its `OpenGeneration`."""
        self._left: list[int] = []
        """By slot, too: the tokens that its request may still get; below 0, it got too many."""

    # ---- to the worker ---------------------------------------------------------------------------

    def start(self, request: GenerationRequest, sink: OutputSink) -> OpenGeneration:
        """Start a request; its output goes to ``sink``.

        The sink gets exactly one terminal call, whatever happens to the worker.
        """
        slot = self._next_slot()
        self._write_start(slot, request)  # first: if it raises, no slot is used
        place: Place = self.view
        for rank in self.view.ranks:
            if rank.dp_rank == request.dp_rank:
                place = rank
        opened = OpenGeneration(self, slot, place, request, sink)
        if slot < len(self.sinks):
            self.sinks[slot] = opened
            self._left[slot] = request.sampling.max_new_tokens
        else:
            self.sinks.append(opened)
            self._left.append(request.sampling.max_new_tokens)
        self._begin(opened)
        return opened

    def abandon(self, opened: OpenGeneration) -> None:
        """See `OpenGeneration.abandon`."""
        slot = opened.slot
        if self._open.get(slot) is opened:
            opened.sink = self.sinks[slot] = None
            self._left[slot] = 0  # all that comes is above it, and isn't passed on
            self.cancel(opened)

    def _write_start(self, slot: int, request: GenerationRequest) -> None:
        control = self._next_control(len(request.prompt))
        try:
            convert.write_start(control.start, slot, request)
        except BaseException:
            last = self._messages[-1]
            if control is last or len(last.controls) == 1:
                self._messages.pop()
            else:
                del last.controls[-1]
            raise

    def _next_control(self, tokens: int = 0) -> Any:
        """Add a control, all that wait in one message where the worker accepts this."""
        if not self._batched:
            return super()._next_control()
        if not self._messages or self._batch_tokens + tokens > _MAX_BATCH_TOKENS:
            self._messages.append(self.rpc.request())
            self._batch_tokens = 0
        self._batch_tokens += tokens
        return self._messages[-1].controls.add()

    @property
    def _requests(self) -> int:
        return len({opened.request_id or slot for slot, opened in self._open.items()})

    def _freed(self, slot: int) -> None:
        self.sinks[slot] = None
        self._left[slot] = 0

    # ---- the token path: once per frame, then once per entry -------------------------------------

    def _receive(self, message: Any) -> Awaitable[None] | None:
        frame: generation_pb2.StepFrame = message.frame
        found, entries = len(frame.token_ids), len(frame.slots)
        if entries > found or found > _MOST_FRAME_TOKENS:
            self._broken(f"sent {entries} entries and {found} tokens in a frame")
        self._metrics.frame(found)
        if frame.logprobs:
            return self._receive_with_logprobs(frame)
        if entries > _ENTRIES_AT_ONCE:
            return self._receive_large(frame)
        # Lists are several times faster to read than the fields.
        self._dispatch_tokens(frame.slots[:], self._token_counts(frame), frame.token_ids[:])
        self._dispatch_ends(frame)
        return None

    async def _receive_large(self, frame: generation_pb2.StepFrame) -> None:
        slots, counts, token_ids = frame.slots[:], self._token_counts(frame), frame.token_ids[:]
        at = 0
        for first in range(0, len(slots), _ENTRIES_AT_ONCE):
            part = slice(first, first + _ENTRIES_AT_ONCE)
            tokens = sum(counts[part]) if counts else len(slots[part])
            self._dispatch_tokens(slots[part], counts[part], token_ids[at : at + tokens])
            at += tokens
            await asyncio.sleep(0)
        if at != len(token_ids):
            self._broken(f"sent {len(token_ids)} tokens in a frame that has {at}")
        self._dispatch_ends(frame)

    async def _receive_with_logprobs(self, frame: generation_pb2.StepFrame) -> None:
        await self._dispatch_with_logprobs(frame, await self._columns(frame))
        self._dispatch_ends(frame)

    def _dispatch_ends(self, frame: generation_pb2.StepFrame) -> None:
        if frame.draining:
            self._connection.on_draining()
        # Converted first: if that raises, no slot must have been released.
        for finish in frame.finishes:
            if finish.HasField("prompt_logprobs"):
                self._check_prompt(finish)
            end = convert.finish_from_proto(finish)
            opened = self._release(finish.slot)
            self._metrics.ended(end.reason.name)
            if opened.sink is not None:
                self._tell(opened.sink.finish, end)
        for failure in frame.errors:
            self._fail(failure.slot, _seen_from_here(error_from_proto(failure.error)))

    def _dispatch_tokens(self, slots: list[int], counts: list[int], token_ids: list[int]) -> None:
        """Pass tokens on; without ``counts`` each slot has one."""
        sinks = self.sinks
        left = self._left
        if not counts:
            for slot, token in zip(slots, token_ids, strict=True):
                left[slot] -= 1
                if left[slot] >= 0:
                    sinks[slot].emit((token,))
                else:
                    self._over_budget(slot)
            return
        at = 0
        for slot, count in zip(slots, counts, strict=True):
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

    async def _dispatch_with_logprobs(
        self, frame: generation_pb2.StepFrame, columns: dict[int, LogprobColumns]
    ) -> None:
        sinks = self.sinks
        tokens: dict[int, list[int]] = {}
        token_ids, at = frame.token_ids[:], 0
        counts = self._token_counts(frame) or [1] * len(frame.slots)
        for slot, count in zip(frame.slots[:], counts, strict=True):
            tokens.setdefault(slot, []).extend(token_ids[at : at + count])
            at += count
        for number, (slot, fresh) in enumerate(tokens.items(), 1):
            if not number % _ENTRIES_AT_ONCE:
                await asyncio.sleep(0)
            own = columns.get(slot, ())
            if own and len(own) != len(fresh):
                self._broken(f"sent {len(fresh)} tokens and {len(own)} logprobs for slot {slot}")
            self._left[slot] -= len(fresh)
            if self._left[slot] >= 0:
                sinks[slot].emit(fresh, own)
            else:
                self._over_budget(slot)

    def _token_counts(self, frame: generation_pb2.StepFrame) -> list[int]:
        counts = frame.token_counts[:]
        if 0 in counts:  # they use no budget: there could be any number of them
            self._broken("sent an entry without tokens")
        return counts

    def _over_budget(self, slot: int) -> None:
        """Fail a request that got too many tokens, once; none of them is passed on."""
        opened = self._in_use(slot)
        if opened.sink is None:
            if self._left[slot] < -_MOST_LATE_TOKENS:
                self._broken(f"goes on with slot {slot} after its budget")
            return
        sink = opened.sink
        self.abandon(opened)
        error = not_asked_for(self.view.address, "more tokens than max_new_tokens")
        self._tell(sink.fail, error)

    def _check_prompt(self, finish: generation_pb2.SlotFinish) -> None:
        expected = self._in_use(finish.slot).prompt_tokens
        if (found := len(finish.prompt_logprobs.token_ids)) > expected:
            self._broken(f"sent logprobs of {found} prompt tokens, of {expected}")


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
