"""Spans and metrics of a turn and its legs.

`GenerationTelemetry.open` at the turn's arrival, then `TurnTelemetry.model_known`, `request_known`,
`leg` for each leg, `first_token` and, at the end, `ended`. A turn that fails before it has a
`Generation` ends when the exception leaves ``with turn:``. Nothing here runs per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from millstream_server.engines.base import Role
from millstream_server.generation.output import Finish, FinishReason
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import given_knobs
from millstream_server.generation.span import (
    NO_SPAN,
    RequestSpan,
    TracedRequest,
    fail,
    reason_of,
    server_of,
)
from millstream_server.runtime.telemetry import metrics
from millstream_server.runtime.telemetry.trace_context import NOT_TRACED, TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing

CHAT, TEXT_COMPLETION, GENERATE_TEXT = "chat", "text_completion", "generate_text"
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


class TurnTelemetry:
    """No-op telemetry of a turn."""

    __slots__ = ()

    trace = NOT_TRACED
    """The trace context of the turn's RPC."""
    trace_id = ""
    """The turn's trace, for log lines; empty without one."""

    def __enter__(self) -> None:
        """Begin the turn."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the turn if there was an exception; otherwise `ended` does."""

    def model_known(self, model: str, provider: str) -> None:
        """Record the turn's model, one we serve, and its engine's vendor."""

    def request_known(self, request: GenerationRequest, n: int) -> None:
        """Record the turn's request."""

    def leg(self, role: Role, address: str) -> RequestSpan:
        """Start the span of one leg."""
        return NO_SPAN

    def encoding(self, address: str) -> RequestSpan:
        """Start the span of one image or video on an encode worker."""
        return NO_SPAN

    def first_token(self) -> None:
        """Record the time of the first token."""

    def ended(self, usage: Usage, reasons: Sequence[FinishReason], error: str, n: int) -> None:
        """End the turn; ``error`` is a reason or `ABANDONED`, or empty: then ``reasons`` has n."""


NO_TELEMETRY = TurnTelemetry()


class GenerationTelemetry:
    """Makes the telemetry of a Processor's turns; one per process."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """Record metrics and, with ``tracing``, spans."""
        self.tracing = tracing
        self._models: dict[tuple[str, str, str], _ModelMetrics] = {}

    def open(
        self, operation: str, trace: TraceContext = NOT_TRACED, number: int = 1
    ) -> TurnTelemetry:
        """Begin a turn, the ``number``-th of its conversation; ``trace`` is its RPC's."""
        return _RecordedTurn(self, operation, trace, number)

    def model(self, operation: str, provider: str, model: str) -> _ModelMetrics:
        """Return a model's metrics; ``model`` must be one we serve, or empty."""
        key = (operation, provider, model)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = _ModelMetrics(operation, provider, model)
        return found


class _ModelMetrics:
    """Metrics of one operation on one model, with the labels set."""

    def __init__(self, operation: str, provider: str, model: str) -> None:
        labels = (operation, provider, model, model)
        self._labels = labels
        self._model = model
        self._durations: dict[str, Any] = {}
        self._hand_offs: dict[str, Any] = {}
        self.first_token = metrics.TIME_TO_FIRST_TOKEN.labels(*labels)
        self.per_token = metrics.TIME_PER_OUTPUT_TOKEN.labels(*labels)
        self.hand_off = metrics.KV_HANDOFF_DURATION.labels(model)
        self.input = metrics.TOKENS.labels(model, "input")
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


class _RecordedTurn(TurnTelemetry):
    """Telemetry of a turn that is recorded."""

    __slots__ = (
        "_arrived",
        "_arrived_ns",
        "_context",
        "_first_token_at",
        "_metrics",
        "_number",
        "_operation",
        "_over",
        "_owner",
        "_sent",
        "_span",
        "trace",
        "trace_id",
    )

    def __init__(
        self, owner: GenerationTelemetry, operation: str, trace: TraceContext, number: int
    ) -> None:
        self._owner = owner
        self._operation = operation
        self.trace = trace
        self._number = number
        self._arrived = time.perf_counter()
        self._arrived_ns = time.time_ns()
        self._first_token_at: float | None = None
        self._metrics: _ModelMetrics | None = None
        self._span: Span | None = None
        self._context: Context | None = None
        self._over = False
        self._sent = False
        self.trace_id = trace.trace_id

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or self._over:
            return
        self._over = True
        measured = self._metrics or self._owner.model(self._operation, "", "")
        measured.duration(reason_of(error), time.perf_counter() - self._arrived)
        span = self._span or self._start_span("", "")
        if span is not None:
            fail(span, reason_of(error), error)
            span.end()

    def model_known(self, model: str, provider: str) -> None:
        self._metrics = self._owner.model(self._operation, provider, model)
        self._span = self._start_span(model, provider)
        if self._span is not None:
            self._context = set_span_in_context(self._span, _NOWHERE)

    def request_known(self, request: GenerationRequest, n: int) -> None:
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
            if knob.attribute:
                attributes[knob.attribute] = value
        if n != 1:
            attributes["gen_ai.request.choice.count"] = n
        span.set_attributes(attributes)

    def _start_span(self, model: str, provider: str) -> Span | None:
        tracing = self._owner.tracing
        if tracing is None:
            return None
        span = tracing.tracer.start_span(
            f"{self._operation} {model}".rstrip(),
            tracing.parent(self.trace),
            SpanKind.INTERNAL,
            {
                "gen_ai.operation.name": self._operation,
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
        name = _LEGS[role]
        span = self._leg_span(name, address)
        return _HandOff(span, self._measured) if role is Role.PREFILL else span

    def encoding(self, address: str) -> RequestSpan:
        return self._leg_span("encode", address)

    def _leg_span(self, name: str, address: str) -> RequestSpan:
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
        if self._over:
            return
        self._over = True
        now = time.perf_counter()
        measured = self._measured
        measured.duration(error, now - self._arrived)
        if self._sent:  # not for a turn that was cancelled before it ran
            measured.input.inc(usage.prompt_tokens)
        measured.cached.inc(usage.cached_tokens)
        measured.output.inc(usage.completion_tokens)
        later_tokens = usage.completion_tokens / n - 1  # of each choice, after its first
        if not error and self._first_token_at is not None and later_tokens > 0:
            measured.per_token.observe((now - self._first_token_at) / later_tokens)
        if self._span is not None:
            self._end_span(self._span, usage, reasons, error)

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
        return self._metrics or self._owner.model(self._operation, "", "")


class _HandOff(RequestSpan):
    """The span of a prefill leg, which also records the hand-off's outcome."""

    __slots__ = ("_leg", "_metrics", "_started")

    def __init__(self, leg: RequestSpan, measured: _ModelMetrics) -> None:
        self._leg = leg
        self._metrics = measured
        self._started = time.perf_counter()

    def carry(self, request: TraceContext) -> TraceContext:
        return self._leg.carry(request)

    def finished(self, finish: Finish) -> None:
        cancelled = finish.reason is FinishReason.CANCELLED
        self._metrics.handed_off("CANCELLED" if cancelled else "ok")
        if not cancelled:
            self._metrics.hand_off.observe(time.perf_counter() - self._started)
        self._leg.finished(finish)

    def failed(self, error: BaseException) -> None:
        self._metrics.handed_off(reason_of(error))
        self._leg.failed(error)
