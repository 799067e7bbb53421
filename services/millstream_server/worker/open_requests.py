"""A worker's open requests, of any ability: their limits, counts and telemetry.

The Processors' queues normally keep a worker far below its limits. The limits are for several
Processors, each of which assumes that it has the whole worker, and for callers without a queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

from opentelemetry.trace import Span, SpanKind
from prometheus_client import Histogram

from millstream_server.control.engine import Role
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    SERVER_FAULTS,
    OverloadedError,
    ServingError,
    WorkerDrainingError,
)
from millstream_server.runtime.retry_delay import jittered
from millstream_server.runtime.rpc.slot_session import Output
from millstream_server.runtime.rpc.slots import internal
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.counts import LoadMeter, RequestCounts
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing, fail, reason_of

DEFAULT_TIMES = 4
"""Default limit: this many times what the engine runs at once, so that it never idles."""
MAX_REQUEST_ID = 128
"""Most characters of a client's request id in a span."""
_RETRY_S = 1.0
StageT = TypeVar("StageT", bound=enum.Enum)
_NO_ATTRIBUTES: Mapping[str, Any] = MappingProxyType({})


class Counted(NamedTuple):
    """What an ability counts of its requests, besides their number."""

    words: str = "prompt tokens"
    """As it is named in errors."""
    cause: str = "tokens"
    """The label of refusals in `millstream_admission_refused_total`."""


PROMPT_TOKENS = Counted()


class Described(NamedTuple):
    """What all requests of a worker have in common, in metrics and spans."""

    operation: str
    """`gen_ai.operation.name`; spans are named after it."""
    role: Role
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLimits:
    """Limits on what is open at once."""

    max_requests: int
    """Requests running and queued in the engine."""
    max_tokens: int = 0
    """Input tokens of these requests, or what else their ability counts; 0: no limit."""


@dataclass(slots=True)
class TokenTotals:
    """Tokens of all requests that have ended since the start."""

    prompt: int = 0
    cached: int = 0
    """Those of the prompts' that were found in the KV cache."""
    completion: int = 0


class OpenRequests:
    """Admits requests, counts them and reports them. All calls come from one event loop.

    One instance per worker and ability. A request is an `CountedRequest`, `admit` and either
    `finished` or `failed`; if it is a coroutine, a `running` block around it.
    """

    def __init__(
        self,
        work: OpenWork,
        described: Described,
        tracing: Tracing | None,
        utilization: Callable[[], float],
        counted: Counted = PROMPT_TOKENS,
    ) -> None:
        """Count in ``work``; ``utilization`` goes into load reports.

        Without ``tracing`` requests have no spans.
        """
        self._counted = counted
        self.tracing = tracing
        self._span_name = f"{described.operation} {described.model}".rstrip()
        self._attributes = {
            "gen_ai.operation.name": described.operation,
            "gen_ai.request.model": described.model,
            "millstream.role": described.role.value,
        }
        self.work = work
        self.count = 0
        """Open requests."""
        self.tokens = 0
        """Input tokens of open requests, or what else their ability counts."""
        self.ended = TokenTotals()
        self.limits = OpenLimits(max_requests=0)
        """Nothing is admitted before this is set."""
        self.meter = LoadMeter(utilization)
        self.counts = RequestCounts(described.role.value)

    def span(self, tracing: Tracing, request_id: str, trace: TraceContext) -> Span:
        attributes = {**self._attributes, "millstream.request_id": request_id[:MAX_REQUEST_ID]}
        return tracing.tracer.start_span(
            self._span_name, tracing.extract(trace), SpanKind.SERVER, attributes
        )

    @contextlib.contextmanager
    def running(
        self, request_id: str, trace: TraceContext, output: Output[Any] | None = None
    ) -> Iterator[CountedRequest]:
        """Trace a request during a ``with`` block, which admits it, and report its end.

        ``output`` is that of a request on a slot stream: it knows why the request is cancelled.
        """
        request = CountedRequest(self, request_id, trace)
        try:
            yield request
        except asyncio.CancelledError as error:
            request.failed((output and output.stopped) or error)
            raise
        except BaseException as error:
            request.failed(error)
            raise
        request.finished("OK", request.attributes)

    def check_accepts(self) -> None:
        """Check that new requests are accepted, of callers without a long stream.

        Raises:
            WorkerDrainingError: the worker is shutting down.
            WorkerPausedError: an operator took it out of service.
        """
        if self.work.refusing:
            raise WorkerDrainingError("this worker is shutting down; retry on another one")
        self.work.check_in_service()

    def check(self, tokens: int) -> None:
        """Check that one more request with ``tokens`` input tokens is within the limits.

        Raises:
            OverloadedError: it isn't.
        """
        limits = self.limits
        if self.count >= limits.max_requests:
            raise _overloaded("requests", f"{limits.max_requests} requests are open on it already")
        # A single input above the limit may run when nothing else is open.
        if self.tokens and limits.max_tokens and self.tokens + tokens > limits.max_tokens:
            raise _overloaded(
                self._counted.cause,
                f"{tokens} more {self._counted.words} would exceed the {limits.max_tokens} that "
                "may be open",
            )


class Stages(Generic[StageT]):
    """Durations of one request's stages, in seconds: for metrics and its span."""

    __slots__ = ("_took",)

    ability: ClassVar[str]
    """Attributes of the span are ``millstream.{ability}.{stage}_s``."""
    histograms: ClassVar[Mapping[Any, Histogram]]
    """By the stage."""

    def __init__(self) -> None:
        self._took: dict[StageT, float] = {}

    def __getitem__(self, stage: StageT) -> float:
        """Return how long a stage took; of one that came several times, all of them."""
        return self._took.get(stage, 0.0)

    def add(self, stage: StageT, took_s: float) -> None:
        self._took[stage] = self[stage] + took_s
        self.histograms[stage].observe(took_s)

    @contextlib.contextmanager
    def timed(self, stage: StageT) -> Iterator[None]:
        """Record the ``with`` block as a stage, unless it raises."""
        began_s = time.monotonic()
        yield
        self.add(stage, time.monotonic() - began_s)

    def attributes(self) -> dict[str, float]:
        return {f"millstream.{self.ability}.{at.value}_s": took for at, took in self._took.items()}


class CountedRequest:
    """One request, from its arrival to its end."""

    __slots__ = (
        "_admitted",
        "_ended",
        "_open",
        "_requests",
        "_span",
        "_tokens",
        "attributes",
        "trace",
    )

    def __init__(self, requests: OpenRequests, request_id: str, trace: TraceContext) -> None:
        """Count and trace a request that has arrived; it isn't admitted yet."""
        requests.counts.begun()
        tracing = requests.tracing
        span = requests.span(tracing, request_id, trace) if tracing else None
        self._requests = requests
        self._span = span
        self._tokens = 0
        self._admitted = self._open = self._ended = False
        self.trace = trace if span is None else Tracing.carry(span, trace.baggage)
        """The parent of the engine's spans: the request's span, else the caller's trace context."""
        self.attributes: Mapping[str, Any] = _NO_ATTRIBUTES
        """For the span of a request that ends well."""

    @property
    def traced(self) -> bool:
        return self._span is not None

    def admit(self, tokens: int) -> None:
        """Count it as open; call `OpenRequests.check` before."""
        self._admitted = self._open = True
        self._tokens = tokens
        self._requests.tokens += tokens
        self._requests.count += 1
        self._requests.work.begin()

    def fetched(self, nbytes: int) -> None:
        if self._span is not None:
            self._span.add_event("millstream.inputs_fetched", {"millstream.bytes": nbytes})

    def leave(self) -> None:
        """Count it as ended. `finished` and `failed` do this too; a second call has no effect.

        Call it first where code between the request's end and its report may raise.
        """
        if self._open:
            self._open = False
            self._requests.tokens -= self._tokens
            self._requests.count -= 1
            self._requests.work.end()

    def finished(self, outcome: str, attributes: Mapping[str, Any] = _NO_ATTRIBUTES) -> None:
        """Report success, once; ``attributes`` go into the span."""
        self.leave()
        if self._ended:
            return
        self._ended = True
        self._requests.meter.finished(failed=False)
        self._requests.counts.ended(outcome)
        if self._span is not None:
            self._span.set_attributes(dict(attributes))
            self._span.end()

    def failed(self, error: BaseException) -> None:
        """Report a failure, once; a request that wasn't admitted doesn't count in load reports."""
        self.leave()
        if self._ended:
            return
        self._ended = True
        if self._admitted:
            self._requests.meter.finished(failed=_is_server_fault(error))
        reason = reason_of(error)
        self._requests.counts.ended(reason)
        if self._span is not None:
            fail(self._span, reason, error)
            self._span.end()


def told(event: str, error: BaseException) -> ServingError:
    """Return what the caller is told of a failure; a bug goes into the log, as ``event``."""
    return error if isinstance(error, ServingError) else internal(event, error)


def _is_server_fault(error: BaseException) -> bool:
    if isinstance(error, ServingError):
        return error.code in SERVER_FAULTS
    return isinstance(error, Exception)  # a cancelled call is the caller's decision


def _overloaded(cause: str, why: str) -> OverloadedError:
    metrics.ADMISSION_REFUSED.labels(cause).inc()
    return OverloadedError(
        f"the worker is busy: {why}; retry later", retry_delay_s=jittered(_RETRY_S)
    )
