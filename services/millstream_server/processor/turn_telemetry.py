"""What is told of a turn: its span and those of its legs, and its metrics.

`Turns.open` at the turn's arrival, `TurnTelemetry.serves` when its model is known, `asks` when the
request is checked, `prefill_leg` and `decode_leg`, `first_token`, and `closed` in the end. A turn
that fails before it is a `Generation` ends by leaving ``with turn:`` with the exception. Nothing
here runs per token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, set_span_in_context

from millstream_server.engines.base import Finish, FinishReason, Sampling
from millstream_server.runtime import metrics
from millstream_server.runtime.tracing import NOT_TRACED, TraceContext, Tracing
from millstream_server.worker_stream.request_span import (
    UNTRACED,
    RequestSpan,
    TracedRequest,
    fail,
    reason_of,
    server_of,
)

if TYPE_CHECKING:
    from millstream_server.processor.generation import GenerationSpec, Usage
    from millstream_server.worker_stream.client import WorkerConnection

CHAT, TEXT_COMPLETION = "chat", "text_completion"
ABANDONED = "ABANDONED"
"""`error.type` of a turn whose client left."""

_NOWHERE = Context()
_NEUTRAL = Sampling(max_new_tokens=0)
_KNOBS = {
    "max_new_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


class TurnTelemetry:
    """Tells nothing: for generations that nobody counts."""

    __slots__ = ()

    trace = NOT_TRACED
    """What the turn's RPC came with."""
    trace_id = ""
    """The turn's trace, for log lines; empty without one."""

    def __enter__(self) -> None:
        """Open the turn."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Leave the rest to the generation, or end with what kept it from starting."""

    def serves(self, model: str, provider: str) -> None:
        """Take down whom the turn is for: a model we serve, and the engine behind it."""

    def asks(self, spec: GenerationSpec) -> None:
        """Take down what the turn asks for."""

    def prefill_leg(self, worker: WorkerConnection) -> RequestSpan:
        """Begin the prompt's leg."""
        return UNTRACED

    def decode_leg(self, worker: WorkerConnection) -> RequestSpan:
        """Begin the answer's leg."""
        return UNTRACED

    def first_token(self) -> None:
        """The first token is there."""

    def closed(self, usage: Usage, reasons: Sequence[FinishReason], error: str, n: int) -> None:
        """End; ``error`` is a reason, `ABANDONED`, or empty with a finish reason per choice."""


UNTOLD = TurnTelemetry()


class Turns:
    """Makes the telemetry of a Processor's turns; one per process."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """Record metrics and, with ``tracing``, spans."""
        self.tracing = tracing
        self._models: dict[tuple[str, str, str], _ModelMetrics] = {}

    def open(self, operation: str, trace: TraceContext = NOT_TRACED, number: int = 1) -> _Turn:
        """Begin a turn, the ``number``-th of its conversation; ``trace`` came with its RPC."""
        return _Turn(self, operation, trace, number)

    def model(self, operation: str, provider: str, model: str) -> _ModelMetrics:
        """Look the metrics of a model up; ``model`` must be one we serve, or empty."""
        key = (operation, provider, model)
        found = self._models.get(key)
        if found is None:
            found = self._models[key] = _ModelMetrics(operation, provider, model)
        return found


class _ModelMetrics:
    """One operation on one model: its metrics with the labels filled in."""

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


class _Turn(TurnTelemetry):
    """A turn that is told of."""

    __slots__ = (
        "_arrived",
        "_arrived_ns",
        "_context",
        "_first_token_at",
        "_metrics",
        "_number",
        "_operation",
        "_over",
        "_sent",
        "_span",
        "_turns",
        "trace",
        "trace_id",
    )

    def __init__(self, turns: Turns, operation: str, trace: TraceContext, number: int) -> None:
        self._turns = turns
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
        measured = self._metrics or self._turns.model(self._operation, "", "")
        measured.duration(reason_of(error), time.perf_counter() - self._arrived)
        span = self._span or self._start_span("", "")
        if span is not None:
            fail(span, reason_of(error), error)
            span.end()

    def serves(self, model: str, provider: str) -> None:
        self._metrics = self._turns.model(self._operation, provider, model)
        self._span = self._start_span(model, provider)
        if self._span is not None:
            self._context = set_span_in_context(self._span, _NOWHERE)

    def asks(self, spec: GenerationSpec) -> None:
        span = self._span
        if span is None or not span.is_recording():
            return
        attributes: dict[str, Any] = {
            "gen_ai.response.id": spec.request_id,
            "millstream.turn": self._number,
        }
        for knob, name in _KNOBS.items():
            value = getattr(spec.sampling, knob)
            if value != getattr(_NEUTRAL, knob):
                attributes[name] = value
        if spec.n != 1:
            attributes["gen_ai.request.choice.count"] = spec.n
        span.set_attributes(attributes)

    def _start_span(self, model: str, provider: str) -> Span | None:
        tracing = self._turns.tracing
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

    def prefill_leg(self, worker: WorkerConnection) -> RequestSpan:
        return _HandOff(self._leg("prefill", worker), self._measured)

    def decode_leg(self, worker: WorkerConnection) -> RequestSpan:
        return self._leg("decode", worker)

    def _leg(self, name: str, worker: WorkerConnection) -> RequestSpan:
        self._sent = True
        tracing = self._turns.tracing
        if tracing is None or self._context is None:
            return UNTRACED
        return TracedRequest(
            tracing.tracer.start_span(
                name, self._context, SpanKind.CLIENT, server_of(worker.address)
            )
        )

    def first_token(self) -> None:
        self._first_token_at = time.perf_counter()
        seconds = self._first_token_at - self._arrived
        self._measured.first_token.observe(seconds)
        if self._span is not None:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def closed(self, usage: Usage, reasons: Sequence[FinishReason], error: str, n: int) -> None:
        if self._over:
            return
        self._over = True
        now = time.perf_counter()
        measured = self._measured
        measured.duration(error, now - self._arrived)
        if self._sent:  # a turn that was stopped while it waited has cost no worker anything
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
        if error:
            fail(span, error, None)
        span.end()

    @property
    def _measured(self) -> _ModelMetrics:
        return self._metrics or self._turns.model(self._operation, "", "")


class _HandOff(RequestSpan):
    """A prefill leg: when it ends, the KV cache is across, or will never be."""

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
