"""Spans and metrics of sent RPCs, where the stock interceptors fail and where they don't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from opentelemetry import baggage
from opentelemetry.context import attach, detach
from opentelemetry.instrumentation.grpc._aio_client import (
    StreamStreamAioClientInterceptor,
    StreamUnaryAioClientInterceptor,
    UnaryStreamAioClientInterceptor,
    UnaryUnaryAioClientInterceptor,
)
from opentelemetry.trace import SpanKind, StatusCode

from millstream_server.runtime.telemetry.client_rpcs import client_interceptors, observe_call
from millstream_server.runtime.telemetry.tracing import PROPAGATOR
from tests.support.rpc_kinds import SERVICE, Kinds, serving
from tests.support.spans import (
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
from tests.support.vendor import STOCK, trap
from tests.support.waiting import EOF, until

Make = Callable[[SpanLog], list[Any]]


def ours(spans: SpanLog) -> list[Any]:
    return client_interceptors(spans.tracing, "worker.example:50051")


def stock(spans: SpanLog) -> list[Any]:
    kinds: Any = (
        UnaryUnaryAioClientInterceptor,
        UnaryStreamAioClientInterceptor,
        StreamUnaryAioClientInterceptor,
        StreamStreamAioClientInterceptor,
    )
    return [kind(spans.tracing.tracer) for kind in kinds]


def both(why: str = "") -> pytest.MarkDecorator:
    """Try both; ``why`` the stock ones fail, if they do."""
    marks = trap(why) if why else STOCK
    return pytest.mark.parametrize("make", [pytest.param(stock, marks=marks), ours])


@both()
async def test_every_kind_of_call_answers_and_is_one_span(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=make(spans)) as client:
        assert await client.unary(b"") == b"answer"
        await spans.until_ended(1)
        assert [r async for r in client.generator(b"")] == [b"first", b"last"]
        await spans.until_ended(2)
        assert await client.gather(iter([b"a", b"b"])) == b"ab"
        await spans.until_ended(3)
        assert [r async for r in client.chat(iter([b"a", b"b"]))] == [b"a", b"b"]
        for span in await spans.until_ended(4):
            assert code_of(span) == "OK"
            assert span.kind is SpanKind.CLIENT


async def test_a_call_keeps_its_whole_api() -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=ours(spans)) as client:
        call = client.chat()
        await call.write(b"a")
        assert await call.read() == b"a"
        await call.write(b"b")
        await call.done_writing()
        assert [message async for message in call] == [b"b"]
        assert await call.read() is EOF
        assert await call.code() is grpc.StatusCode.OK
        assert await call.trailing_metadata() is not None
        assert await call.initial_metadata() is not None
        assert call.done()
        assert not call.cancelled()
        unary = client.unary(b"hang")
        assert unary.cancel()
        assert await unary.code() is grpc.StatusCode.CANCELLED
        assert unary.cancelled()


@both("awaits the end before it answers, and then never ends the span")
async def test_a_cancelled_unary_call_raises_and_is_a_span(make: Make) -> None:
    spans, kinds = SpanLog(), Kinds()
    async with serving(kinds, client_interceptors=make(spans)) as client:
        call = asyncio.ensure_future(_await(client.unary(b"hang")))
        await until(lambda: kinds.entered == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        span = await spans.only()
        await until(lambda: kinds.cancelled == 1)
    assert code_of(span) == "CANCELLED"
    assert span.status.status_code is StatusCode.ERROR


@both("a stream that is cancelled is no exported span")
async def test_a_stream_that_the_consumer_leaves_early_is_a_span(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=make(spans)) as client:
        call = client.generator(b"hang")
        assert await call.read() == b"first"
        call.cancel()
        assert code_of(await spans.only()) == "CANCELLED"


@both("a stream that is left open is no exported span")
async def test_a_stream_that_the_consumer_forgets_is_a_span_when_its_channel_closes(
    make: Make,
) -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=make(spans)) as client:
        async for message in client.generator(b"hang"):
            assert message == b"first"
            break
        assert not spans.ended
    assert code_of(await spans.only()) == "CANCELLED"


@both("the span of a stream whose reader is cancelled is never exported")
async def test_a_cancelled_reader_hears_of_it(make: Make) -> None:
    spans, kinds = SpanLog(), Kinds()
    async with serving(kinds, client_interceptors=make(spans)) as client:
        call = client.generator(b"hang")
        assert await call.read() == b"first"
        reader = asyncio.ensure_future(call.read())
        await until(lambda: kinds.entered == 1)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        call.cancel()
        span = await spans.only()
    assert code_of(span) == "CANCELLED"


@both("a failed stream's status text is a representation, and recorded as an exception")
async def test_failures_have_their_code_and_reach_the_caller(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=make(spans)) as client:
        for call in (client.unary(b"refuse"), client.generator(b"refuse")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _await(call)
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert caught.value.details() == "not now"
        for span in await spans.until_ended(2):
            assert code_of(span) == "FAILED_PRECONDITION"
            assert span.status.status_code is StatusCode.ERROR
            assert span.status.description == "not now"
            assert not exceptions(span)


async def test_spans_follow_the_conventions() -> None:
    spans = SpanLog()
    async with serving(Kinds(), client_interceptors=ours(spans)) as client:
        await client.unary(b"")
        span = await spans.only()
        with pytest.raises(grpc.aio.AioRpcError):
            await client.unary(b"refuse")
    assert attributes(spans.ended[1])["error.type"] == "FAILED_PRECONDITION"
    assert span.name == f"{SERVICE}/Unary"
    assert dict(attributes(span)) == {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/Unary",
        "rpc.response.status_code": "OK",
        "server.address": "worker.example",
        "server.port": 50051,
    }


@both()
async def test_the_running_context_travels_in_the_metadata(make: Make) -> None:
    spans = SpanLog()
    arrived: dict[str, Any] = {}

    class Looking(Kinds):
        def look(self, context: Any) -> None:
            arrived.update(context.metadata)

    async with serving(Looking(), client_interceptors=make(spans)) as client:
        token = attach(
            baggage.set_baggage("user", "x", PROPAGATOR.extract(dict(INCOMING))),
        )
        try:
            await client.unary(b"", metadata=(("own", "kept"),))
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
    for interceptors in (client_interceptors(None, "x:1"), ours(SpanLog())):
        measured = Samples()
        async with serving(Kinds(), client_interceptors=interceptors) as client:
            await client.unary(b"")
            with pytest.raises(grpc.aio.AioRpcError):
                await client.unary(b"refuse")
            assert [r async for r in client.generator(b"")] == [b"first", b"last"]
            assert _calls(measured, "Unary", "OK") == 1
            assert _calls(measured, "Unary", "FAILED_PRECONDITION") == 1
            assert _calls(measured, "Generator", "OK") == 1


async def test_methods_without_spans_and_observed_calls_are_only_measured() -> None:
    spans, measured = SpanLog(), Samples()
    quiet = client_interceptors(spans.tracing, "x:1", without_spans={f"{SERVICE}/Chat"})
    async with serving(Kinds(), client_interceptors=quiet) as client:
        assert [r async for r in client.chat(iter([b"a"]))] == [b"a"]
        assert _calls(measured, "Chat", "OK") == 1
    async with serving(Kinds()) as client:
        call = client.generator(b"hang")
        observe_call(call, f"{SERVICE}/Generator")
        assert await call.read() == b"first"
        call.cancel()
        await until(lambda: _calls(measured, "Generator", "CANCELLED") == 1)
    assert not spans.ended


async def _await(call: Any) -> Any:
    if not hasattr(call, "read"):
        return await call
    return [message async for message in call]


def _calls(measured: Samples, method: str, code: str) -> float:
    return measured.grown(
        "rpc_client_call_duration_seconds_count",
        rpc_method=f"{SERVICE}/{method}",
        rpc_response_status_code=code,
    )
