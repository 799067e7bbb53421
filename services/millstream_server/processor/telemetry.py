"""Spans and metrics of requests and their legs.

A `TurnTelemetry` is made at a request's arrival, then `TurnTelemetry.model_known` and, for text,
`request_known`, `leg` for each leg, `first_token` and, at the end, `ended`; all other requests have
`at_worker` and `succeeded`. `failed` ends one before. Nothing here runs per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from millstream_server.control.engine import TEXT_TASKS, Role, Task
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import given_knobs
from millstream_server.runtime.frozen import dataclass
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing, fail, reason_of, server_of

_OPERATIONS = {
    Task.CHAT: "chat",
    Task.COMPLETE: "text_completion",
    Task.GENERATE_TEXT: "generate_text",
    Task.EMBED: "embeddings",
    Task.RERANK: "rerank",
    Task.GENERATE_IMAGE: "generate_image",
    Task.GENERATE_VIDEO: "generate_video",
}
"""`gen_ai.operation.name`."""
ABANDONED = "ABANDONED"
"""`error.type` of a turn whose client disconnected."""

_LEGS = {
    Role.PREFILL: "prefill",
    Role.DECODE: "decode",
    Role.AGGREGATED: "decode",
    Role.DIFFUSION: "generate_text",
}
"""Names of the legs' spans."""
_NOWHERE = Context()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a turn, over all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    media_tokens: int = 0
    reasoning_tokens: int = 0


class RequestSpan:
    """The span of a request or of a part of it. Of `ended` and `failed` only the first call counts.

    By itself, without tracing, it records nothing and passes the trace context on.
    """

    __slots__ = ()

    def carry(self, request: TraceContext) -> TraceContext:
        """Return the trace context for the next hop; ``request`` is the incoming one."""
        return request

    def ended(self, *, cancelled: bool = False) -> None:
        """Record the good end; ``cancelled``: as CANCELLED."""

    def failed(self, error: BaseException) -> None:
        """Record the failure."""


NO_SPAN = RequestSpan()


class TracedRequest(RequestSpan):
    """With tracing: records a span, which the next hop's becomes a child of."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span: Span | None = span

    def carry(self, request: TraceContext) -> TraceContext:
        return Tracing.carry(self._span, request.baggage) if self._span else request

    def ended(self, *, cancelled: bool = False) -> None:
        span, self._span = self._span, None
        if span is not None:
            span.end()

    def failed(self, error: BaseException) -> None:
        if self._span is not None:
            fail(self._span, reason_of(error), error)
        self.ended()


class FrontTelemetry:
    """Makes the telemetry of a Processor's requests; one per process."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self._models: dict[tuple[Task, str, str], _ModelMetrics] = {}

    def model(self, task: Task, provider: str, model: str) -> _ModelMetrics:
        """Return a model's metrics; ``model`` must be one we serve, or empty."""
        key = (task, provider, model)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = _ModelMetrics(task, provider, model)
        return found


class _ModelMetrics:
    """Metrics of one task on one model, with the labels set; most are for text only."""

    def __init__(self, task: Task, provider: str, model: str) -> None:
        labels = (_OPERATIONS[task], provider, model, model)
        self._labels = labels
        self._model = model
        self._durations: dict[str, Any] = {}
        self._hand_offs: dict[str, Any] = {}
        self.input = metrics.TOKENS.labels(model, "input")
        if task not in TEXT_TASKS:
            return
        self.first_token = metrics.TIME_TO_FIRST_TOKEN.labels(*labels)
        self.per_token = metrics.TIME_PER_OUTPUT_TOKEN.labels(*labels)
        self.hand_off = metrics.KV_HANDOFF_DURATION.labels(model)
        self.cached = metrics.TOKENS.labels(model, "cached")
        self.output = metrics.TOKENS.labels(model, "output")

    def duration(self, error: str, seconds: float) -> None:
        child = self._durations.get(error)
        if child is None:
            child = self._durations[error] = metrics.REQUEST_DURATION.labels(*self._labels, error)
        child.observe(seconds)

    def handed_off(self, outcome: str) -> None:
        child = self._hand_offs.get(outcome)
        if child is None:
            child = self._hand_offs[outcome] = metrics.KV_HANDOFFS.labels(self._model, outcome)
        child.inc()


class TurnTelemetry:
    """Telemetry of a request that arrives now; a turn is the ``number``-th of its conversation."""

    __slots__ = ("_arrived", "_arrived_ns", "_context", "_first_token_at", "_metrics", "_number",
                 "_over", "_owner", "_sent", "_span", "_task", "trace", "trace_id")  # fmt: skip

    def __init__(
        self,
        owner: FrontTelemetry,
        task: Task,
        trace: TraceContext = NOT_TRACED,
        number: int = 1,
    ) -> None:
        self._owner = owner
        self._task = task
        self.trace = trace
        """The trace context of the turn's RPC."""
        self._number = number
        self._arrived = time.perf_counter()
        self._arrived_ns = time.time_ns() if owner.tracing else 0
        self._first_token_at: float | None = None
        self._metrics: _ModelMetrics | None = None
        self._span: Span | None = None
        self._context: Context | None = None
        self._over = False
        self._sent = False
        self.trace_id = trace.trace_id
        """The turn's trace, for log lines; empty without one."""

    def model_known(self, model: str, provider: str, request_id: str = "") -> None:
        """Record the turn's model, one we serve, and its engine's vendor."""
        self._metrics = self._owner.model(self._task, provider, model)
        self._span = self._start_span(model, provider)
        if self._span is not None:
            self._context = set_span_in_context(self._span, _NOWHERE)
            if request_id:
                self._span.set_attribute("gen_ai.response.id", request_id)

    def request_known(self, request: GenerationRequest, n: int, *, own_seed: bool = True) -> None:
        """Record the turn's request; ``own_seed``: its seed, if any, is the client's."""
        span = self._span
        if span is None or not span.is_recording():
            return
        sampling = request.sampling
        attributes: dict[str, Any] = {
            "gen_ai.response.id": request.request_id,
            "millstream.turn": self._number,
            "gen_ai.request.max_tokens": sampling.max_new_tokens,
        }
        for knob, value in given_knobs(sampling):
            if knob.attribute and (own_seed or knob.name != "seed"):
                attributes[knob.attribute] = value
        if n != 1:
            attributes["gen_ai.request.choice.count"] = n
        span.set_attributes(attributes)

    def _start_span(self, model: str, provider: str) -> Span | None:
        tracing = self._owner.tracing
        if tracing is None:
            return None
        operation = _OPERATIONS[self._task]
        # Where a stream carries many requests, the current span is the stream's.
        parent = tracing.parent if self._task in TEXT_TASKS else tracing.extract
        span = tracing.tracer.start_span(
            f"{operation} {model}".rstrip(),
            parent(self.trace),
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": provider,
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
            },
            start_time=self._arrived_ns,
        )
        self.trace_id = f"{span.get_span_context().trace_id:032x}"
        return span

    def leg(self, role: Role, address: str) -> RequestSpan:
        self._sent = True
        span = self.at_worker(_LEGS[role], address)
        return _HandOff(span, self._measured) if role is Role.PREFILL else span

    def at_worker(self, name: str, address: str) -> RequestSpan:
        """Start the span of anything else that a worker does."""
        tracing = self._owner.tracing
        if tracing is None or self._context is None:
            return NO_SPAN
        return TracedRequest(
            tracing.tracer.start_span(name, self._context, SpanKind.CLIENT, server_of(address))
        )

    def first_token(self) -> None:
        self._first_token_at = time.perf_counter()
        seconds = self._first_token_at - self._arrived
        self._measured.first_token.observe(seconds)
        if self._span is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def ended(self, usage: Usage, reasons: Sequence[FinishReason], error: str, n: int) -> None:
        """End the turn; ``error`` is a reason or `ABANDONED`, or empty: then ``reasons`` has n."""
        if self._over:
            return
        self._over = True
        now = time.perf_counter()
        measured = self._measured
        measured.duration(error, now - self._arrived)
        if self._sent:  # not for a turn that was cancelled before it ran
            measured.input.inc(usage.prompt_tokens)
        if usage.cached_tokens:
            measured.cached.inc(usage.cached_tokens)
        measured.output.inc(usage.completion_tokens)
        later_tokens = usage.completion_tokens / n - 1  # of each choice, after its first
        if not error and self._first_token_at is not None and later_tokens > 0:
            measured.per_token.observe((now - self._first_token_at) / later_tokens)
        if self._span is not None:
            self._end_span(self._span, usage, reasons, error)

    def succeeded(self, input_tokens: int) -> None:
        """End a request without tokens of its own; the model has read ``input_tokens``."""
        self._over = True
        self._measured.duration("", time.perf_counter() - self._arrived)
        self._measured.input.inc(input_tokens)
        if self._span is not None:
            self._span.set_attribute("gen_ai.usage.input_tokens", input_tokens)
            self._span.end()

    def failed(self, error: BaseException) -> None:
        """End it, unless it has ended."""
        if self._over:
            return
        self._over = True
        reason = reason_of(error)
        self._measured.duration(reason, time.perf_counter() - self._arrived)
        span = self._span or self._start_span("", "")
        if span is not None:
            fail(span, reason, error)
            span.end()

    def _end_span(
        self, span: Span, usage: Usage, reasons: Sequence[FinishReason], error: str
    ) -> None:
        span.set_attributes(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [reason.value for reason in reasons],
            }
        )
        if usage.media_tokens:
            span.set_attribute("millstream.usage.media_tokens", usage.media_tokens)
        if error:
            fail(span, error, None)
        span.end()

    @property
    def _measured(self) -> _ModelMetrics:
        return self._metrics or self._owner.model(self._task, "", "")


class _HandOff(RequestSpan):
    """The span of a prefill leg, which also records the hand-off's outcome."""

    __slots__ = ("_leg", "_metrics", "_started")

    def __init__(self, leg: RequestSpan, measured: _ModelMetrics) -> None:
        self._leg = leg
        self._metrics = measured
        self._started = time.perf_counter()

    def carry(self, request: TraceContext) -> TraceContext:
        return self._leg.carry(request)

    def ended(self, *, cancelled: bool = False) -> None:
        self._metrics.handed_off("CANCELLED" if cancelled else "ok")
        if not cancelled:
            self._metrics.hand_off.observe(time.perf_counter() - self._started)
        self._leg.ended()

    def failed(self, error: BaseException) -> None:
        self._metrics.handed_off(reason_of(error))
        self._leg.failed(error)
