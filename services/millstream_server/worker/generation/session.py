"""The worker's side of a stream of text: starts and cancels in, step frames out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from millstream.v1 import generation_pb2
from millstream_server.engines.base import Role
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.protobuf.generation import start_from_proto
from millstream_server.runtime.errors import DeadlinePassedError, InvalidRequestError
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.rpc.slots import Slot, Slots
from millstream_server.runtime.telemetry.counts import stream_metrics
from millstream_server.worker.generation.frames import FrameBuilder


class RequestRunner(Protocol):
    """What runs a stream's requests.

    `worker.generation.core.GenerationWorker`, or a Processor's
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
        """Run requests on ``runner``; ``response_type`` is a message with a field `frame`."""
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
