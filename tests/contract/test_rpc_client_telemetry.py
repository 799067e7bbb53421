"""Spans and metrics of the RPCs that a link sends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import baggage
from opentelemetry.context import attach, detach
from opentelemetry.trace import SpanKind, StatusCode

from millstream_server.links.channel import CallError, Rpc
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.runtime.errors import Code
from millstream_server.runtime.telemetry.tracing import PROPAGATOR
from millstream_testing.waiting import until
from tests.support.telemetry.spans import (
    INCOMING,
    SPAN_ID,
    TRACE_ID,
    Samples,
    SpanLog,
    attributes,
    code_of,
    exceptions,
    id_of,
    parent_of,
    trace_of,
)
from tests.support.wire.rpc_kinds import SERVICE, Kinds, serving


class Plain:
    """Bytes as a message."""

    SerializeToString = staticmethod(bytes)
    FromString = staticmethod(bytes)


UNARY = Rpc(f"{SERVICE}/Unary", Plain, Plain)
GENERATOR = Rpc(f"{SERVICE}/Generator", Plain, Plain)
CHAT = Rpc(f"{SERVICE}/Chat", Plain, Plain)


@contextlib.asynccontextmanager
async def linked(kinds: Kinds, spans: SpanLog | None) -> AsyncIterator[GrpcChannel]:
    async with serving(kinds) as client:
        channel = GrpcChannel(client.target, tracing=spans.tracing if spans else None)
        async with contextlib.aclosing(channel):
            yield channel


async def test_a_call_is_a_span_by_the_conventions() -> None:
    spans = SpanLog()
    async with linked(Kinds(), spans) as channel:
        assert await channel.call(UNARY, b"") == b"answer"
        span = await spans.only()
    assert span.kind is SpanKind.CLIENT
    assert span.name == UNARY.name
    port = attributes(span)["server.port"]
    assert dict(attributes(span)) == {
        "rpc.system.name": "grpc",
        "rpc.method": UNARY.name,
        "rpc.response.status_code": "OK",
        "server.address": "127.0.0.1",
        "server.port": port,
    }


async def test_a_cancelled_call_raises_and_is_a_span() -> None:
    spans, kinds = SpanLog(), Kinds()
    async with linked(kinds, spans) as channel:
        call = asyncio.ensure_future(channel.call(UNARY, b"hang"))
        await until(lambda: kinds.entered == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        span = await spans.only()
        await until(lambda: kinds.cancelled == 1)
    assert code_of(span) == "CANCELLED"
    assert span.status.status_code is StatusCode.ERROR


async def test_a_failure_has_its_code_and_reaches_the_caller() -> None:
    spans = SpanLog()
    async with linked(Kinds(), spans) as channel:
        with pytest.raises(CallError, match="not now") as caught:
            await channel.call(UNARY, b"refuse")
        span = await spans.only()
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert code_of(span) == attributes(span)["error.type"] == "FAILED_PRECONDITION"
    assert span.status.status_code is StatusCode.ERROR
    assert span.status.description == "not now"
    assert not exceptions(span)


async def test_the_running_context_travels_in_the_metadata() -> None:
    spans = SpanLog()
    arrived: dict[str, Any] = {}

    class Looking(Kinds):
        def look(self, context: Any) -> None:
            arrived.update(context.metadata)

    async with linked(Looking(), spans) as channel:
        token = attach(baggage.set_baggage("user", "x", PROPAGATOR.extract(dict(INCOMING))))
        try:
            sent = (("own", "kept"), ("traceparent", "replaced"))
            await channel.call(UNARY, b"", metadata=sent)
        finally:
            detach(token)
        span = await spans.only()
    assert trace_of(span) == TRACE_ID
    assert f"{parent_of(span):016x}" == SPAN_ID
    assert arrived["traceparent"] == f"00-{TRACE_ID}-{id_of(span):016x}-01"
    assert arrived["tracestate"] == "vendor=1"
    assert set(arrived["baggage"].split(",")) == {"tenant=blue", "user=x"}
    assert arrived["own"] == "kept"


async def test_calls_are_measured_with_and_without_tracing() -> None:
    for spans in (None, SpanLog()):
        measured = Samples()
        async with linked(Kinds(), spans) as channel:
            await channel.call(UNARY, b"")
            with pytest.raises(CallError):
                await channel.call(UNARY, b"refuse")
        assert _calls(measured, "Unary", "OK") == 1
        assert _calls(measured, "Unary", "FAILED_PRECONDITION") == 1


async def test_streams_are_only_measured() -> None:
    spans, measured = SpanLog(), Samples()
    async with linked(Kinds(), spans) as channel:
        chat = channel.stream(CHAT)
        await chat.write(b"a")
        assert await chat.read() == b"a"
        await chat.done_writing()
        assert await chat.read() is None
        await until(lambda: _calls(measured, "Chat", "OK") == 1)
        watch = channel.watch(GENERATOR, b"hang")
        assert await watch.read() == b"first"
        watch.cancel()
        await until(lambda: _calls(measured, "Generator", "CANCELLED") == 1)
        left = channel.watch(GENERATOR, b"hang")
        assert await left.read() == b"first"
    await until(lambda: _calls(measured, "Generator", "CANCELLED") == 2)
    assert not spans.ended


def _calls(measured: Samples, method: str, code: str) -> float:
    return measured.grown(
        "rpc_client_call_duration_seconds_count",
        rpc_method=f"{SERVICE}/{method}",
        rpc_response_status_code=code,
    )
