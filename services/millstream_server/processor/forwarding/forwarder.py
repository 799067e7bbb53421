"""The way of a request that one worker runs whole: checked, admitted, sent, ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from millstream_server.engines.base import EngineInfo
from millstream_server.generation.span import RequestSpan
from millstream_server.processor.forwarding.fit import Fit
from millstream_server.processor.forwarding.held_bytes import HeldBytes
from millstream_server.processor.forwarding.telemetry import ForwardedTelemetry
from millstream_server.processor.models import Models
from millstream_server.processor.prompts import Prompts
from millstream_server.processor.queue.admission import Admission, AdmissionRequest
from millstream_server.processor.queue.admission_queue import AdmissionQueue
from millstream_server.processor.queue.positions import Positions, Tell
from millstream_server.routing.request import RoutingRequest
from millstream_server.routing.router import Router
from millstream_server.routing.tasks import Task
from millstream_server.runtime.errors import (
    SERVER_FAULTS,
    DeadlinePassedError,
    InvalidRequestError,
    ServingError,
)
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.telemetry.load_meter import LoadMeter
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing

log = get_log(__name__)

_MAX_LOGGED_ID = 128
_OPERATIONS = {
    Task.EMBED: "embeddings",
    Task.RERANK: "rerank",
    Task.GENERATE_IMAGE: "generate_image",
    Task.GENERATE_VIDEO: "generate_video",
}
"""`gen_ai.operation.name`."""


class Forwardable(Protocol):
    """What forwarding reads of a request."""

    @property
    def model(self) -> str:
        """As its client wrote it."""
        ...

    @property
    def request_id(self) -> str:
        """Not empty."""
        ...

    @property
    def priority(self) -> Priority:
        """In the queue."""
        ...

    @property
    def trace(self) -> TraceContext:
        """Its own or its stream's."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """On the clock of `time.monotonic`; None: none."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingParts:
    """What all forwarded requests of a process share."""

    models: Models
    prompts: Prompts
    router: Router
    queues: Mapping[str, AdmissionQueue]
    meter: LoadMeter
    held: HeldBytes
    max_request_tokens: int = 4 << 20
    tracing: Tracing | None = None


class Forwarder:
    """Makes the `Forwarded` of each request; one per process."""

    def __init__(self, parts: ForwardingParts) -> None:
        """Forward with ``parts``."""
        self.parts = parts
        self.positions = {
            name: Positions(queue, self._outstanding(name)) for name, queue in parts.queues.items()
        }

    def _outstanding(self, name: str) -> Callable[[], int]:
        return lambda: self.parts.router.task_workers(name).outstanding

    @contextlib.contextmanager
    def request(self, task: Task, request: Forwardable, nbytes: int) -> Iterator[Forwarded]:
        """Find the request's model; yield what to do with it. It has ended when this ends.

        ``nbytes`` is about what its content takes.

        Raises:
            ServingError: it can't run, or the block raised it.
        """
        telemetry = ForwardedTelemetry(self.parts.tracing, _OPERATIONS[task], request.trace)
        request_id = request.request_id[:_MAX_LOGGED_ID]  # a longer one will be refused
        forwarded: Forwarded | None = None
        try:
            with telemetry, _deadline(request), self.parts.held.hold(nbytes):
                name = self.parts.models.name_of(request.model, task)
                engines = self.parts.router.task_workers(name).engines(task)
                telemetry.known(name, engines[0].engine, request_id)
                forwarded = Forwarded(self, telemetry, task, request, name)
                try:
                    yield forwarded
                finally:
                    forwarded.close()
        except InvalidRequestError:
            raise  # the client's fault is no load
        except ServingError as error:
            self.parts.meter.finished(failed=error.code in SERVER_FAULTS)
            raise
        else:
            self.parts.meter.finished()
        finally:
            write = log.info if telemetry.outcome == "OK" else log.caused
            write(
                "request ended",
                request=request_id,
                trace_id=telemetry.trace_id,
                model=forwarded.name if forwarded else "-",
                task=task.name,
                outcome=telemetry.outcome,
            )


class Forwarded:
    """One request. Order of calls: `admit`, `pick`, `leg`, `ended`; `close` always."""

    def __init__(
        self,
        forwarder: Forwarder,
        telemetry: ForwardedTelemetry,
        task: Task,
        request: Forwardable,
        name: str,
    ) -> None:
        """Use `Forwarder.request` to make one."""
        self.name = name
        """The model's."""
        self._forwarder = forwarder
        self._parts = forwarder.parts
        self._telemetry = telemetry
        self._task = task
        self._request = request
        self._admission: Admission | None = None
        self._span: RequestSpan | None = None

    def engines(self) -> list[EngineInfo]:
        """Return what the workers that do this say about their engines.

        Raises:
            NoWorkerError: there is none.
        """
        return self._parts.router.task_workers(self.name).engines(self._task)

    async def admit(self, *, tokens: int = 0, tell: Tell | None = None) -> None:
        """Wait until the request may run; ``tell`` gets its positions in the queue.

        Raises:
            ServingError: it was refused, displaced, or its deadline passed.
        """
        request = self._request
        left_s = None if request.deadline_s is None else request.deadline_s - time.monotonic()
        admission = self._admission = self._parts.queues[self.name].enter(
            AdmissionRequest(tokens=tokens, priority=request.priority, timeout_s=left_s)
        )
        if not admission.waits:
            return
        positions = self._forwarder.positions[self.name]
        if tell is not None:
            positions.follow(admission, tell)
        try:
            await admission.admitted()
        finally:
            positions.forget(admission)

    def pick(self, fit: Fit) -> tuple[str, EngineInfo]:
        """Pick the worker; return its address and its engine's info.

        Raises:
            NoWorkerError: there is none.
        """
        routed = RoutingRequest(model=self.name, priority=self._request.priority)
        return self._parts.router.task_workers(self.name).pick(routed, self._task, fit)

    def leg(self, address: str) -> TraceContext:
        """Begin the request at a worker; return the trace context for it."""
        self._span = self._telemetry.leg(self._task.name.lower(), address)
        return self._span.carry(self._request.trace)

    def released(self) -> None:
        """Release the capacity: the worker has ended the request."""
        if self._admission is not None:
            self._admission.leave()

    def used(self, input_tokens: int) -> None:
        """Record the tokens that the model has read."""
        self._telemetry.used(input_tokens)

    def ended(self, error: BaseException | None = None) -> None:
        """Record how the request ended at the worker."""
        if self._span is None:
            return
        if error is None:
            self._span.succeeded()
        else:
            self._span.failed(error)

    def close(self) -> None:
        """Release what it holds, in any state."""
        self.released()
        self.ended(asyncio.CancelledError())  # without effect after its end


@contextlib.contextmanager
def _deadline(request: Forwardable) -> Iterator[None]:
    """Let a request that was cancelled for its deadline fail with that, for its telemetry."""
    try:
        yield
    except asyncio.CancelledError:
        if request.deadline_s is not None and request.deadline_s <= time.monotonic():
            raise DeadlinePassedError("the deadline passed before the request had ended") from None
        raise
