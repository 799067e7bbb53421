"""One request on one worker, as a span: the Processor's leg of it and the worker's own part."""

from __future__ import annotations

from typing import Any

from opentelemetry.trace import Span, Status, StatusCode

from millstream_server.engines.base import Finish
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.tracing import TraceContext, Tracing


class RequestSpan:
    """Without tracing: records nothing and passes on what came.

    Exactly one of `finished` and `failed` counts, the first.
    """

    __slots__ = ()

    def carry(self, request: TraceContext) -> TraceContext:
        """Answer the context for the next hop; ``request`` is the one that came."""
        return request

    def finished(self, finish: Finish) -> None:
        """Note the request's good end."""

    def failed(self, error: BaseException) -> None:
        """Note the request's failure."""


UNTRACED = RequestSpan()


class TracedRequest(RequestSpan):
    """With tracing."""

    __slots__ = ("_span", "_tells_usage")

    def __init__(self, span: Span, *, tells_usage: bool = False) -> None:
        """Own ``span``, which has started, and end it; one end of a stream tells the usage."""
        self._span: Span | None = span
        self._tells_usage = tells_usage

    def carry(self, request: TraceContext) -> TraceContext:
        """Make the next hop a child of this span."""
        return Tracing.carry(self._span, request.baggage) if self._span else request

    def finished(self, finish: Finish) -> None:
        """End the span with what was used."""
        span, self._span = self._span, None
        if span is None:
            return
        if self._tells_usage:
            span.set_attributes(_usage(finish))
        span.end()

    def failed(self, error: BaseException) -> None:
        """End the span with the failure's reason."""
        span, self._span = self._span, None
        if span is not None:
            fail(span, reason_of(error), error)
            span.end()


def _usage(finish: Finish) -> dict[str, Any]:
    return {
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
        "gen_ai.response.finish_reasons": (finish.reason.value,),
    }


def reason_of(error: BaseException | None) -> str:
    """Name a failure as the contract does; what isn't one of ours is internal."""
    if error is None:
        return ""
    if isinstance(error, ServingError):
        return error.reason
    return "INTERNAL" if isinstance(error, Exception) else "CANCELLED"


def fail(span: Span, reason: str, error: BaseException | None) -> None:
    """Mark a span as failed; only sentences made for callers go into it."""
    message = error.message if isinstance(error, ServingError) else ""
    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, message or reason))


def server_of(address: str) -> dict[str, Any]:
    """Write a worker's "host:port" as attributes."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return {"server.address": address}
    return {"server.address": host.strip("[]"), "server.port": int(port)}
