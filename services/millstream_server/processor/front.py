"""What every request passes, whatever it asks for: telemetry, admission, its worker, its end.

A `FrontRequest` is made when a request arrives, and ended once. Text, images, videos, vectors and
scores use the same one; each ability's own path says what is done in its ``with`` block.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from millstream_server.control.engine import TEXT_TASKS, EngineInfo, Task
from millstream_server.links.entry_stream import SlotCall
from millstream_server.processor.admission import Admission, AdmissionQueue
from millstream_server.processor.losses import LOSSES, RepeatedLosses, count_from_zero
from millstream_server.processor.models import Models
from millstream_server.processor.requests import DEFAULT_LIMITS, RequestLimits
from millstream_server.processor.telemetry import (
    NO_SPAN,
    FrontTelemetry,
    RequestSpan,
    TurnTelemetry,
)
from millstream_server.processor.waiting import Positions, Tell
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.router import Router
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    SERVER_FAULTS,
    DeadlinePassedError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry.counts import LoadMeter
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import reason_of
from millstream_server.runtime.work.pool import CURRENT_KEY

log = get_log(__name__)

_MAX_LOGGED_ID = 128
"""A longer one will be refused."""
MAX_HELD_BYTES = 512 << 20


CallT = TypeVar("CallT", bound=SlotCall[Any, Any])


class Front:
    """What a Processor's calls and requests share; one per process."""

    def __init__(
        self,
        models: Models,
        router: Router,
        *,
        limits: RequestLimits = DEFAULT_LIMITS,
        telemetry: FrontTelemetry | None = None,
        max_held_bytes: int = MAX_HELD_BYTES,
        redispatch: bool = True,
        is_full: Callable[[], bool] = bool,
    ) -> None:
        """Serve ``models`` on the workers that ``router`` picks; others if one is lost.

        ``is_full``: see `AdmissionQueue`.

        Requests on slot streams, and answers that are put together, may take ``max_held_bytes``
        together. Messages of other RPCs count until the RPC ends (`runtime.rpc.limits`). A slot
        stream may stay open for days, so its requests count until they end.
        """
        self.work = OpenWork()
        self.held = Ledger(
            max_held_bytes,
            busy="the server is busy: open requests hold {used} of the {most} bytes it has for "
            "them, and this one needs {amount}; retry later",
        )
        self.models = models
        self.router = router
        self.limits = limits
        self.redispatch = redispatch
        self.repeated = RepeatedLosses()
        self._is_full = is_full
        if redispatch:
            count_from_zero(models.names)
        self.telemetry = telemetry or FrontTelemetry()
        self.meter = LoadMeter(self._utilization, named=self._named)
        self.queues = {name: self._queue(name) for name in models.names}
        """Of each model."""
        self.positions = {
            name: Positions(queue, self._outstanding(name)) for name, queue in self.queues.items()
        }

    @contextlib.contextmanager
    def call(self, on_drain: Callable[[], None] | None = None) -> Iterator[None]:
        """Count an RPC as open during a ``with`` block.

        ``on_drain`` is called if the server begins to shut down.

        Raises:
            UnavailableError: this process is shutting down. Turns admitted before still run.
        """
        if self.work.refusing:
            raise UnavailableError(
                "this server is shutting down; retry on another one", retry_delay_s=0.1
            )
        self.work.begin(on_drain)
        try:
            yield
        finally:
            self.work.end(on_drain)

    def count(self, error: BaseException | None) -> None:
        """Count an end in the load reports, but not what is the client's fault."""
        if error is None:
            self.meter.finished()
        elif isinstance(error, ServingError) and not isinstance(error, InvalidRequestError):
            self.meter.finished(failed=error.code in SERVER_FAULTS)

    def _queue(self, name: str) -> AdmissionQueue:
        queue = AdmissionQueue(
            name,
            self.limits.queue,
            lambda: self.router.capacity(name),
            is_full=self._is_full,
            open_tokens=lambda: self.router.of(name).open_tokens,
        )
        self.router.watch(queue.changed)
        return queue

    def _outstanding(self, name: str) -> Callable[[], int]:
        return lambda: self.router.task_workers(name).outstanding

    def running(self) -> int:
        """Count the requests that run, each choice as one."""
        return sum(queue.running for queue in self.queues.values())

    def _named(self) -> dict[str, float]:
        """Return what load reports have besides: totals, without the names of models."""
        return {
            "running_requests": self.running(),
            "queued_requests": sum(queue.queued for queue in self.queues.values()),
            "first_tokens": self.telemetry.first_tokens,
            "first_token_seconds": self.telemetry.first_token_s,
        }

    def _utilization(self) -> float:
        return max((queue.utilization for queue in self.queues.values()), default=0.0)


class FrontRequest:
    """One request, from its arrival to its end.

    Order of calls: `known` or `find`, `enter` or `admit`, then `end`. An exception that leaves the
    ``with`` block ends it as failed.

    A request for text is handed on in the block: a `Turn` then owns its `Admission` and its
    `telemetry`, and ends both instead of `end`. All others end in the block.
    """

    __slots__ = ("_admission", "_deadline_s", "_held_bytes", "_over", "_request_id", "_running",
                 "_span", "_task", "front", "given", "model", "telemetry")  # fmt: skip

    def __init__(
        self,
        front: Front,
        task: Task,
        trace: TraceContext,
        *,
        request_id: str = "",
        deadline_s: float | None = None,
        number: int = 1,
    ) -> None:
        """Open a request that arrives now.

        ``trace`` is its own or its RPC's, ``deadline_s`` on the clock of `time.monotonic`,
        ``number`` counts the turns of a conversation.
        """
        self.telemetry = TurnTelemetry(front.telemetry, task, trace, number)
        self.model = ""
        """The model's name, when it is known."""
        self.given = False
        """Whether the client was given a part of the result: it can't start again."""
        self.front = front
        self._task = task
        self._admission: Admission | None = None
        self._request_id = request_id
        self._deadline_s = deadline_s
        self._held_bytes = 0
        self._span: RequestSpan = NO_SPAN
        self._running: SlotCall[Any, Any] | None = None
        self._over = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End it if the block has failed.

        Raises:
            DeadlinePassedError: the block was cancelled for the request's deadline.
        """
        if error is None:
            return
        deadline_s = self._deadline_s
        if (
            isinstance(error, asyncio.CancelledError)
            and deadline_s is not None
            and deadline_s <= time.monotonic()
        ):
            late = DeadlinePassedError("the deadline passed before the request had ended")
            self.end(late)
            raise late from None
        self.end(error)

    # ---- its model and its capacity --------------------------------------------------------------

    def known(self, model: str, provider: str) -> None:
        """Record its model, one we serve, and the vendor of the model's engine."""
        self.model = model
        self.telemetry.model_known(model, provider, self._request_id[:_MAX_LOGGED_ID])

    async def find(self, model: str) -> list[EngineInfo]:
        """Find its model and the workers that do its task; return what their engines are.

        Raises:
            ServingError: the model isn't served here, or has no such worker.
        """
        router = self.front.router
        name = self.front.models.name_of(model, self._task)
        engines = await router.found(lambda: router.task_workers(name).engines(self._task))
        self.known(name, engines[0].engine)
        return engines

    def engines(self) -> list[EngineInfo]:
        """Return what the engines of the workers that do its task are now.

        Raises:
            NoWorkerError: there is none.
        """
        return self.front.router.task_workers(self.model).engines(self._task)

    def hold(self, nbytes: int) -> None:
        """Count about what its content takes, until its end.

        Raises:
            OverloadedError: requests may take no more memory.
        """
        self.front.held.take(nbytes)
        self._held_bytes += nbytes

    def enter(
        self, units: int, tokens: int, priority: Priority, timeout_s: float | None, prompt: int = 0
    ) -> Admission:
        """Take it into its model's queue: it runs or waits; see `AdmissionQueue.enter`.

        Raises:
            OverloadedError: the queue is full, or the wait would exceed its deadline.
        """
        admission = self._admission = self.front.queues[self.model].enter(
            units,
            tokens=tokens,
            prompt=prompt,
            priority=priority,
            timeout_s=timeout_s,
            caller=CURRENT_KEY.get(),
        )
        return admission

    async def admit(self, priority: Priority, *, tokens: int = 0, tell: Tell | None = None) -> None:
        """Wait until it may run; ``tell`` gets its positions in the queue.

        Raises:
            ServingError: it was refused, displaced, or its deadline passed.
        """
        left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        admission = self.enter(1, tokens, priority, left_s)
        if not admission.waits:
            return
        positions = self.front.positions[self.model]
        if tell is not None:
            positions.follow(admission, tell)
        try:
            await admission.admitted()
        finally:
            positions.forget(admission)

    # ---- one worker that runs all of it ----------------------------------------------------------

    def pick(self, fit: Fit, priority: Priority, avoid: str = "") -> tuple[str, EngineInfo]:
        """Pick its worker; return the address and what its engine is.

        Raises:
            NoWorkerError: there is none, but for the one at the address ``avoid``.
        """
        routed = RoutingRequest(model=self.model, priority=priority, avoid=(avoid,))
        return self.front.router.task_workers(self.model).pick(routed, self._task, fit)

    def leg(self, address: str) -> TraceContext:
        """Begin its span at a worker; return the trace context for the worker."""
        self._span = self.telemetry.at_worker(self._task.name.lower(), address)
        return self._span.carry(self.telemetry.trace)

    def lost(self, error: ServingError) -> None:
        """Its worker was lost; it starts again at another one."""
        self._span.failed(error)

    def follow(self, running: CallT) -> CallT:
        """Cancel what runs for it if it fails; release its capacity when the worker has ended.

        If the worker is lost, its capacity is kept: it may start again.
        """
        self._running = running
        running.when_ended(lambda: None if isinstance(running.error, LOSSES) else self._release())
        return running

    def _release(self) -> None:
        if self._admission is not None:
            self._admission.leave()

    # ---- its end ---------------------------------------------------------------------------------

    def end(self, error: BaseException | None = None, *, input_tokens: int = 0) -> None:
        """Release what it holds, count it, and log it unless it is text; once.

        ``input_tokens`` are those that the model has read.
        """
        if self._over:
            return
        self._over = True
        self._release()
        self.front.held.give_back(self._held_bytes)
        if error is None:
            self._span.ended()
            self.telemetry.succeeded(input_tokens)
        else:
            if self._running is not None:
                self._running.cancel()
            self._span.failed(error)
            self.telemetry.failed(error)
        self.front.count(error)
        if self._task not in TEXT_TASKS:
            write = log.caused if error else log.info
            write(
                "request ended",
                request=self._request_id[:_MAX_LOGGED_ID],
                trace_id=self.telemetry.trace_id,
                model=self.model or "-",
                task=self._task.name,
                outcome=reason_of(error) or "OK",
            )


class Fit:
    """Checks one request against workers' infos; equal infos once.

    It is the filter of `TaskWorkers.pick` (`routing.task_workers`), also for workers that connect
    later.
    """

    def __init__(self, check: Callable[[EngineInfo], object]) -> None:
        """``check`` raises InvalidRequestError if an engine can't take the request."""
        self._check = check
        self._errors: dict[EngineInfo, InvalidRequestError | None] = {}

    def __call__(self, engine: EngineInfo) -> bool:
        return self._error(engine) is None

    def require(self, engines: Iterable[EngineInfo]) -> None:
        """Check that one of them can take the request.

        Raises:
            InvalidRequestError: none can; it says what the first one can't.
        """
        errors = []
        for engine in engines:
            if (error := self._error(engine)) is None:
                return
            errors.append(error)
        if errors:
            raise errors[0]

    def _error(self, engine: EngineInfo) -> InvalidRequestError | None:
        if engine not in self._errors:
            try:
                self._check(engine)
            except InvalidRequestError as error:
                self._errors[engine] = error
            else:
                self._errors[engine] = None
        return self._errors[engine]
