"""The worker's side of a stream of text: starts and cancels in, step frames out, in columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from millstream.v1 import generation_pb2
from millstream_server.control.engine import Role
from millstream_server.generation import wire as convert
from millstream_server.generation.output import (
    Finish,
    FinishReason,
    OutputSink,
    TokenLogprob,
    logprob_bytes,
    output_bytes,
)
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.wire import start_from_proto
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import DeadlinePassedError, InvalidRequestError, ServingError
from millstream_server.runtime.rpc.slots import Outgoing, Slot, Slots
from millstream_server.runtime.telemetry.counts import StreamMetrics, stream_metrics

_MAX_ENDS = 1024
"""While more ends are waiting to be sent, no further control of the caller is obeyed."""
_FRAME_BYTES = 3 << 20
"""A frame with several things in it has no more. gRPC's clients take 4 MiB unless they say
otherwise, and a Processor 16 MiB: a larger one would end the stream, with every request on it. A
single thing is at most 11 MB: the logprobs of a long prompt, 2^20 of them as Processors ask for."""
_TOKEN_BYTES, _LOGPROB_BYTES, _END_BYTES = 10, 10, 256
"""Most bytes of a token with its slot, of a logprob, and of an end without its texts."""


class FrameBuilder(Outgoing[Any]):
    """Collects what slots report; `take` makes the next frame of it.

    Everything reported in one iteration of the event loop is in one frame. Tokens collect while a
    write is in progress: a slow reader gets fewer, larger frames, of a bounded size each.
    """

    __slots__ = (
        "_counts",
        "_errors",
        "_finishes",
        "_logprobs",
        "_metrics",
        "_response_type",
        "_sequence",
        "_slots",
        "_token_ids",
    )

    def __init__(self, response_type: Callable[[], Any], metrics: StreamMetrics) -> None:
        """Make responses of ``response_type``, a message with a field `frame`."""
        super().__init__()
        self._response_type = response_type
        self._metrics = metrics
        self._sequence = 0
        self._slots: list[int] = []
        self._counts: list[int] = []
        """Tokens per entry of ``_slots``."""
        self._token_ids: list[int] = []
        self._logprobs: list[tuple[int, Sequence[TokenLogprob]]] = []
        """With the index of their entry in ``_slots``."""
        self._finishes: list[tuple[int, Finish]] = []
        self._errors: list[tuple[int, ServingError]] = []

    # The token path: one call per request and engine step.
    def emit(
        self, slot: int, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()
    ) -> None:
        if not self.filled:
            self._fill()
        self._slots.append(slot)
        self._counts.append(len(token_ids))
        self._token_ids += token_ids
        if logprobs:
            self._logprobs.append((len(self._slots) - 1, logprobs))

    def finish(self, slot: int, finish: Finish) -> None:
        self._fill()
        self._finishes.append((slot, finish))

    def fail(self, slot: int, error: ServingError) -> None:
        self._fill()
        self._errors.append((slot, error))

    @property
    def crowded(self) -> bool:
        return len(self._finishes) + len(self._errors) > _MAX_ENDS

    @property
    def held_bytes(self) -> int:
        """About what waits to be sent, in memory."""
        return (
            output_bytes(self._token_ids, ())
            + sum(logprob_bytes(found) for _, found in self._logprobs)
            + sum(logprob_bytes(finish.prompt_logprobs) for _, finish in self._finishes)
        )

    def take(self) -> Iterable[Any]:
        """Make a response; what has no room in it stays for the next one.

        Ends stay behind all tokens: a slot's end comes after its last token.
        """
        response = self._response_type()
        frame = response.frame  # filled in place: setting a message field copies the message
        self._sequence += 1
        frame.sequence = self._sequence
        if self._draining:
            frame.draining = True
        room = self._take_tokens(frame)
        sizes: Iterable[int] = (
            _END_BYTES + _logprob_bytes(finish.prompt_logprobs) for _, finish in self._finishes
        )
        count, room = _fitting(sizes, room, at_least_one=not frame.slots)
        for slot, finish in self._finishes[:count]:
            convert.write_finish(frame.finishes.add(slot=slot), finish)
        del self._finishes[:count]
        sizes = (_END_BYTES + 4 * len(error.message) for _, error in self._errors)
        alone = not (frame.slots or frame.finishes)
        count, _ = _fitting(sizes, 0 if self._finishes else room, at_least_one=alone)
        for slot, error in self._errors[:count]:
            frame.errors.add(slot=slot, error=error_to_proto(error))
        del self._errors[:count]
        self._metrics.frame(len(frame.token_ids))
        self._empty(rest=bool(self._slots or self._finishes or self._errors))
        return (response,)

    def _take_tokens(self, frame: Any) -> int:
        """Move entries to ``frame``; return the room that is left, 0 if not all had room."""
        slots, token_ids, entries = self._slots, self._token_ids, len(self._slots)
        tokens, room = len(token_ids), _FRAME_BYTES - _TOKEN_BYTES * len(token_ids)
        if self._logprobs or room < 0:
            extra = {at: _logprob_bytes(found) for at, found in self._logprobs}
            sizes = (_TOKEN_BYTES * n + extra.get(at, 0) for at, n in enumerate(self._counts))
            entries, room = _fitting(sizes, _FRAME_BYTES, at_least_one=True)
            tokens = sum(self._counts[:entries])
        if not entries:
            return room
        whole = entries == len(slots)
        frame.slots.extend(slots if whole else slots[:entries])
        frame.token_ids.extend(token_ids if whole else token_ids[:tokens])
        if entries != tokens:
            frame.token_counts.extend(self._counts[:entries])
        if self._logprobs:
            for at, found in self._logprobs:
                if at < entries:
                    frame.logprobs.add(slot=slots[at], tokens=convert.logprobs_to_proto(found))
            rest = [(at - entries, found) for at, found in self._logprobs if at >= entries]
            self._logprobs = rest
        del slots[:entries], self._counts[:entries], token_ids[:tokens]
        return room


def _fitting(sizes: Iterable[int], room: int, *, at_least_one: bool) -> tuple[int, int]:
    """Return how many of the first sizes fit, and the room that is left."""
    number = 0
    for size in sizes:
        if size > room and (number or not at_least_one):
            return number, 0
        room -= size
        number += 1
    return number, room


def _logprob_bytes(logprobs: Sequence[TokenLogprob]) -> int:
    return sum(_LOGPROB_BYTES * (1 + len(entry.top)) for entry in logprobs)


class RequestRunner(Protocol):
    """What runs a stream's requests.

    `generation.worker.core.GenerationWorker`, or a Processor's
    `processor.diffusion.text.TextForwarder`.
    """

    role: Role
    work: OpenWork
    """Counts open requests; knows whether the worker drains."""
    streams: OpenWork
    """Counts streams; a drain waits until those notified of it have ended."""

    def context_length_of(self, model: str) -> int:
        """Return the most tokens of prompt and completion together; a worker has one model.

        Raises:
            ServingError: the model isn't served here.
        """
        ...

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        """Check and start a request; return the id for `cancel`.

        Raises:
            ServingError: it was refused.
        """
        ...

    def cancel(self, engine_id: str) -> None:
        """Stop a request at any stage."""
        ...


class WorkerSession(Slots[Any, generation_pb2.StartGeneration, Any]):
    """One stream of PrefillRequest, DecodeRequest or GenerateTextRequest messages; see `Slots`.

    A request has no task: the engine pushes its output.
    """

    server = "worker"
    # A frame costs each end some 50 us whatever is in it; engine steps are 10 ms apart, so frames
    # wait only where many requests start and end.
    least_gap_s = 0.001

    def __init__(self, runner: RequestRunner, response_type: Callable[[], Any]) -> None:
        self.runner = runner
        self.frames = FrameBuilder(response_type, stream_metrics(runner.role.value))
        super().__init__(runner.work, runner.streams, self.frames)

    def _controls(self, message: Any) -> Iterable[Any]:
        if not message.controls:
            return (message,)
        if message.WhichOneof("control"):
            raise InvalidRequestError.of("controls", "set either this or one of start, cancel")
        controls: Iterable[Any] = message.controls
        return controls

    def _obey(self, control: Any) -> None:
        kind = control.WhichOneof("control")
        if kind == "start":
            self._start(control.start.slot, control.start)
        elif kind == "cancel":
            self._cancel(control.cancel.slot)
        else:
            raise InvalidRequestError.of("control", "set one of start, cancel")

    def _slot(self, number: int) -> _TextSlot:
        return _TextSlot(self, number)


class _TextSlot(Slot[WorkerSession, generation_pb2.StartGeneration]):
    """One request's slot; the engine's sink, as far as this stream is concerned."""

    __slots__ = ("_engine_id", "emit")

    too_late = "the deadline passed before the request reached the worker"
    deadline_passed = "the deadline passed; what was generated was sent"

    def __init__(self, session: WorkerSession, number: int) -> None:
        super().__init__(session, number)
        self._engine_id = ""
        self.emit = partial(session.frames.emit, number)  # token path: a single Python call

    def start(self, start: generation_pb2.StartGeneration) -> None:
        session = self.session
        context_length = session.runner.context_length_of(start.model)
        request = start_from_proto(start, context_length, session.trace)
        self.run_until(request.deadline_s)
        self._engine_id = session.runner.submit(request, self)

    def cancel(self) -> None:
        self.session.runner.cancel(self._engine_id)

    def finish(self, finish: Finish) -> None:
        stopped = self.stopped
        if isinstance(stopped, DeadlinePassedError) and finish.reason is FinishReason.CANCELLED:
            self.fail(stopped)
            return
        self.free()
        self.session.frames.finish(self.number, finish)
