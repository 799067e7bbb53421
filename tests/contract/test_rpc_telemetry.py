"""Spans and metrics of served RPCs, where the stock interceptor fails and where it doesn't.

`stock` is the server interceptor of opentelemetry-instrumentation-grpc 0.66b2, the version that
pyproject.toml pins because we use private parts of it. When it passes a test it is expected to
fail, our layer may be able to give way to it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry import baggage, trace
from opentelemetry.instrumentation.grpc._aio_server import OpenTelemetryAioServerInterceptor
from opentelemetry.trace import SpanKind, StatusCode

from millstream_server.runtime.rpc.grpc_server import RpcInterceptor
from millstream_server.runtime.rpc.server_telemetry import TelemetryLayer
from millstream_testing.waiting import EOF, until
from tests.support.telemetry.spans import (
    INCOMING,
    SPAN_ID,
    TRACE_ID,
    Samples,
    SpanLog,
    attributes,
    code_of,
    exceptions,
    parent_of,
    trace_of,
)
from tests.support.vendor import STOCK, trap
from tests.support.wire.rpc_kinds import SERVICE, Kinds, serving

pytestmark = pytest.mark.both_transports

INSTRUMENTATION = "opentelemetry-instrumentation-grpc"
PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
Make = Callable[[SpanLog], list[Any]]
SERVED = [
    f"/{SERVICE}/{name}" for name in ("Unary", "Generator", "Writer", "Chat", "Reader", "Gather")
]


def ours(spans: SpanLog) -> list[Any]:
    return [TelemetryLayer(spans.tracing, served=SERVED)]


def stock(spans: SpanLog) -> list[Any]:
    return [OpenTelemetryAioServerInterceptor(spans.tracing.tracer)]  # type: ignore[no-untyped-call]


def stock_before_ours(spans: SpanLog) -> list[Any]:
    return [*stock(spans), RpcInterceptor()]


def both(why: str = "", raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Try both; ``why`` the stock one fails, if it does, and what that raises.

    What it asserts is what a repaired one would do, and no more.
    """
    marks = trap(why, raises) if why else STOCK
    return pytest.mark.parametrize("make", [pytest.param(stock, marks=marks), ours])


def theirs(why: str, raises: type[Exception] = AssertionError) -> pytest.MarkDecorator:
    """Say why the stock one fails where ours has nothing of the kind: handlers of grpc's API."""
    return pytest.mark.xfail(strict=True, raises=raises, reason=f"facts: {why}")


def test_the_version_is_the_tested_one() -> None:
    assert version(INSTRUMENTATION) == "0.66b2"
    assert f'"{INSTRUMENTATION}==0.66b2"' in PYPROJECT.read_text()


# ---- what kind of handler


@both()
async def test_unary_and_generator_handlers_answer_and_make_one_span_each(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        assert await client.unary(b"") == b"answer"
        await spans.until_ended(1)
        assert [r async for r in client.generator(b"")] == [b"first", b"last"]
        await spans.until_ended(2)
        assert await client.gather(iter([b"a", b"b"])) == b"ab"
        await spans.until_ended(3)
        assert [r async for r in client.chat(iter([b"a", b"b"]))] == [b"a", b"b"]
        assert {code_of(span) for span in await spans.until_ended(4)} == {"OK"}
    assert all(span.status.status_code is StatusCode.UNSET for span in spans.ended)


@pytest.mark.filterwarnings("ignore:coroutine 'Kinds.writer' was never awaited")
@theirs("iterates a handler that writes, as if it were a generator", grpc.aio.AioRpcError)
async def test_handlers_that_read_and_write_answer() -> None:
    spans = SpanLog()
    async with serving(Kinds(), stock(spans)) as client:
        assert [r async for r in client.writer(b"")] == [b"first", b"last"]
        call = client.reader()
        for message in (b"a", b"b"):
            await call.write(message)
            assert await call.read() == message
        await call.done_writing()
        assert await call.read() is EOF
        assert {code_of(span) for span in await spans.until_ended(2)} == {"OK"}


@both()
async def test_a_span_ends_when_its_stream_does(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        call = client.chat()
        await call.write(b"a")
        assert await call.read() == b"a"
        assert not spans.ended
        await call.done_writing()
        assert await call.read() is EOF
        assert code_of(await spans.only()) == "OK"


# ---- how it ends


@pytest.mark.parametrize("method", ["unary", "generator", "chat"])
@both("a cancelled RPC is UNSET and 0")
async def test_a_cancelled_rpc_says_so_and_is_cancelled(make: Make, method: str) -> None:
    spans, kinds = SpanLog(), Kinds()
    async with serving(kinds, make(spans)) as client:
        call = getattr(client, method)(*([] if method == "chat" else [b"hang"]))
        if method == "chat":
            await call.write(b"hang")
        elif method == "generator":
            assert await call.read() == b"first"
        await until(lambda: kinds.entered == 1)
        call.cancel()
        span = await spans.only()
        assert kinds.cancelled == 1  # the handler's clean-up ran: the cancellation wasn't swallowed
    assert code_of(span) == "CANCELLED"
    assert not exceptions(span)


async def test_a_cancellation_is_an_error() -> None:
    spans, kinds, measured = SpanLog(), Kinds(), Samples()
    async with serving(kinds, ours(spans)) as client:
        calls = client.unary(b"hang"), client.generator(b"hang")
        await until(lambda: kinds.entered == 2)
        for call in calls:
            call.cancel()
        for span in await spans.until_ended(2):
            assert code_of(span) == "CANCELLED"
            assert span.status.status_code is StatusCode.ERROR
            assert attributes(span)["error.type"] == "CANCELLED"
            assert not exceptions(span)
    assert measured.grown("millstream_rpc_server_open") == 0


async def test_a_deadline_is_told_from_a_cancellation() -> None:
    spans = SpanLog()
    async with serving(Kinds(), ours(spans)) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.unary(b"hang", timeout=0.05)
        span = await spans.only()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert code_of(span) == "DEADLINE_EXCEEDED"
    assert span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("make", "method"),
    [
        pytest.param(
            stock_before_ours, "unary", marks=theirs("an uncaught exception is recorded twice")
        ),
        (ours, "unary"),
        (ours, "generator"),
    ],
)
async def test_an_uncaught_exception_is_internal_and_told_once(make: Make, method: str) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        call = getattr(client, method)(b"bug")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (call if method == "unary" else _drain(call))
        span = await spans.only()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert code_of(span) == "INTERNAL"
    assert span.status.status_code is StatusCode.ERROR
    assert len(exceptions(span)) == 1


@theirs("what the interceptor after it lets through is UNSET and 0")
async def test_an_exception_that_nobody_maps_is_unknown_as_on_the_wire() -> None:
    spans = SpanLog()
    async with serving(Kinds(), stock(spans)) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.unary(b"bug")
        span = await spans.only()
    assert caught.value.code() is grpc.StatusCode.UNKNOWN
    assert code_of(span) == "UNKNOWN"
    assert span.status.status_code is StatusCode.ERROR


async def test_what_is_told_is_the_bug_and_not_the_abort_it_led_to() -> None:
    spans = SpanLog()
    async with serving(Kinds(), ours(spans)) as client:
        with pytest.raises(grpc.aio.AioRpcError):
            await client.unary(b"bug")
        (event,) = exceptions(await spans.only())
    assert (event.attributes or {})["exception.type"] == "LookupError"


@theirs("an abort is recorded as two exceptions")
async def test_an_abort_has_its_code_and_is_no_exception() -> None:
    await _refused_for_the_callers_mistake(stock, b"abort")


async def test_a_status_has_its_code_and_is_no_exception() -> None:
    await _refused_for_the_callers_mistake(ours, b"refuse")


async def _refused_for_the_callers_mistake(make: Make, request: bytes) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        for method in (client.unary, client.generator):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _finish(method(request))
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert caught.value.details() == "not now"
        for span in await spans.until_ended(2):
            assert code_of(span) == "FAILED_PRECONDITION"
            assert span.status.status_code is StatusCode.UNSET  # the caller's mistake, not ours
            assert not exceptions(span)


@theirs("abort_with_status is UNSET and 0")
async def test_abort_with_status_has_its_code() -> None:
    await _failed(stock, b"abort_with_status", grpc.StatusCode.UNAVAILABLE, "away")


async def test_a_failure_has_its_code() -> None:
    await _failed(ours, b"away", grpc.StatusCode.UNAVAILABLE, "away")


async def test_set_code_counts() -> None:
    await _failed(stock, b"set_code", grpc.StatusCode.DATA_LOSS, "gone")


async def _failed(make: Make, request: bytes, code: grpc.StatusCode, details: str) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        for method in (client.unary, client.generator):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _finish(method(request))
            assert caught.value.code() is code
        for span in await spans.until_ended(2):
            assert code_of(span) == code.name
            assert span.status.status_code is StatusCode.ERROR
            assert details in (span.status.description or "")


# ---- context


@both("a generator closed by the collector detaches in a foreign context")
async def test_the_context_is_detached_where_it_was_attached(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        call = client.generator(b"flood")  # cancelled while it sends, so outside of the generator
        assert await call.read() == b"first"
        call.cancel()
        await spans.only()
        gc.collect()
        await asyncio.sleep(0)
        await until(lambda: not _open_generators())
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


@both()
async def test_the_clients_context_reaches_the_handler_and_is_the_spans_parent(make: Make) -> None:
    spans = SpanLog()
    seen: list[Any] = []

    class Looking(Kinds):
        def look(self, context: Any) -> None:
            seen.append((trace.get_current_span().get_span_context(), baggage.get_all()))

    async with serving(Looking(), make(spans)) as client:
        await client.unary(b"", metadata=INCOMING)
        span = await spans.only()
    assert trace_of(span) == TRACE_ID
    assert f"{parent_of(span):016x}" == SPAN_ID
    ((inside, carried),) = seen
    assert inside == span.context
    assert inside.trace_state.to_header() == "vendor=1"
    assert carried == {"tenant": "blue"}


async def test_a_server_without_tracing_extracts_nothing_and_measures() -> None:
    seen: list[Any] = []
    measured = Samples()

    class Looking(Kinds):
        def look(self, context: Any) -> None:
            seen.append(trace.get_current_span().get_span_context().is_valid)

    async with serving(Looking(), [TelemetryLayer(served=SERVED)]) as client:
        await client.unary(b"", metadata=INCOMING)
    assert seen == [False]
    assert _calls(measured, "Unary", "OK") == 1


async def test_a_stream_of_many_requests_is_no_span_but_passes_its_context_on() -> None:
    spans, measured = SpanLog(), Samples()
    seen: list[Any] = []

    class Looking(Kinds):
        def look(self, context: Any) -> None:
            seen.append(trace.get_current_span().get_span_context())

    telemetry = TelemetryLayer(spans.tracing, served=SERVED, without_spans={f"{SERVICE}/Chat"})
    async with serving(Looking(), [telemetry]) as client:
        assert [r async for r in client.chat(iter([b"a"]), metadata=INCOMING)] == [b"a"]
        await until(lambda: _calls(measured, "Chat", "OK") == 1)
    assert not spans.ended
    assert f"{seen[0].span_id:016x}" == SPAN_ID


# ---- what is told


@both("old semantic conventions")
async def test_spans_follow_the_conventions(make: Make) -> None:
    spans = SpanLog()
    async with serving(Kinds(), make(spans)) as client:
        await client.unary(b"")
        span = await spans.only()
    assert span.name == f"{SERVICE}/Unary"
    assert span.kind is SpanKind.SERVER
    said = dict(attributes(span))
    assert 0 < int(str(said.pop("client.port"))) < 1 << 16
    wanted = {
        "rpc.system.name": "grpc",
        "rpc.method": f"{SERVICE}/Unary",
        "rpc.response.status_code": "OK",
        "client.address": "127.0.0.1",
    }
    assert wanted.items() <= said.items()
    assert make is stock or said == wanted


async def test_calls_are_measured_by_method_and_code() -> None:
    spans, measured = SpanLog(), Samples()
    async with serving(Kinds(), ours(spans)) as client:
        await client.unary(b"")
        with pytest.raises(grpc.aio.AioRpcError):
            await client.unary(b"refuse")
        call = client.chat()
        await call.write(b"a")
        await call.read()
        open_rpcs = measured.grown("millstream_rpc_server_open", rpc_method=f"{SERVICE}/Chat")
        await call.done_writing()
        await call.code()
        await spans.until_ended(3)
    assert _calls(measured, "Unary", "OK") == 1
    assert _calls(measured, "Unary", "FAILED_PRECONDITION") == 1
    assert _calls(measured, "Chat", "OK") == 1
    assert open_rpcs == 1
    assert measured.grown("millstream_rpc_server_open") == 0


async def test_all_unknown_methods_have_one_label() -> None:
    measured = Samples()
    async with serving(Kinds(), [TelemetryLayer(served=SERVED)]) as client:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.channel.unary_unary(f"/{SERVICE}/Guessed")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    count = "rpc_server_call_duration_seconds_count"
    assert measured.grown(count, rpc_method="_OTHER") == 1
    assert measured.grown(count, rpc_method=f"{SERVICE}/Guessed") == 0, "callers choose no labels"


async def _drain(call: Any) -> None:
    async for _ in call:
        pass


async def _finish(call: Any) -> None:
    await (_drain(call) if hasattr(call, "read") else call)


def _calls(measured: Samples, method: str, code: str) -> float:
    return measured.grown(
        "rpc_server_call_duration_seconds_count",
        rpc_system_name="grpc",
        rpc_method=f"{SERVICE}/{method}",
        rpc_response_status_code=code,
    )


def _open_generators() -> list[Any]:
    """Find the interceptors' generators that still wait to be closed."""
    return [
        found
        for found in gc.get_objects()
        if type(found).__name__ == "async_generator"
        and found.__name__ in ("observed", "_stream_interceptor")
        and found.ag_frame is not None
    ]
