"""gRPC's requests and statuses at the wire, grpc/grpc's doc/PROTOCOL-HTTP2.md: beyond grpcio's."""

from __future__ import annotations

import base64
from urllib.parse import unquote

import pytest
from google.rpc import error_details_pb2, status_pb2

from millstream_server.runtime.errors import Code
from millstream_testing.waiting import until
from tests.contract.transport.conftest import STREAMS, UNARY, InteropServer
from tests.support.wire.interop_service import ECHOED, ECHOED_BIN, SERVICE, ask
from tests.support.wire.raw_http2 import (
    END_HEADERS,
    ErrorCode,
    Kind,
    Rpc,
    Wire,
    frame,
    message,
    request_fields,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

BIDI, GATHER = f"/{SERVICE}/Bidi", f"/{SERVICE}/ClientStream"


def _request(wire: Wire, *more: tuple[str, str | bytes], **changed: str | None) -> Rpc:
    """Send a normal message with other headers."""
    rpc = wire.rpc(fields=[*request_fields(UNARY, **changed), *more])
    rpc.send(ask(1), end=True)
    return rpc


# ---- requests ------------------------------------------------------------------------------------


async def test_a_sound_answer_frame_by_frame(wire: Wire) -> None:
    rpc = _request(wire)
    trailers = await rpc.end()
    first, *between, last = [f for f in wire.frames if f.stream == rpc.stream]
    assert dict(first.fields)[":status"] == "200"
    assert dict(first.fields)["content-type"] == "application/grpc"
    assert {f.kind for f in between} == {Kind.DATA}
    assert rpc.received == message(bytes(1))
    assert (last.kind, last.ends) == (Kind.HEADERS, True)
    assert trailers == {"grpc-status": "0"}


async def test_headers_that_came_before_mean_the_same_again(wire: Wire) -> None:
    """They are parsed once; what a refused request had is refused each time."""
    for value in ("a", "a", "a", "b", "a", "b", "b"):
        assert await _echoed(wire, (ECHOED, value)) == [(ECHOED, value)]
    for _ in range(4):
        rpc = _request(wire, method="PUT")
        assert (await rpc.headers())[":status"] == "405"
        await rpc.end()


@pytest.mark.parametrize(
    "content_type", ["application/grpc+proto", "application/grpc+json", "application/grpc;a=b"]
)
async def test_content_types_that_begin_with_grpc_s(wire: Wire, content_type: str) -> None:
    assert await _request(wire, content_type=content_type).code() == Code.OK


@pytest.mark.parametrize("content_type", ["application/xml", "text/plain", "", None])
async def test_other_content_types_are_unsupported(wire: Wire, content_type: str | None) -> None:
    rpc = _request(wire, content_type=content_type)
    assert (await rpc.headers())[":status"] == "415"
    await rpc.end()


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "post", "X"])
async def test_other_http_methods_are_not_allowed(wire: Wire, method: str) -> None:
    rpc = _request(wire, method=method)
    assert (await rpc.headers())[":status"] == "405"
    await rpc.end()


async def test_a_request_without_te_is_served(wire: Wire) -> None:
    assert await _request(wire, te=None).code() == Code.OK


@pytest.mark.parametrize(
    "path",
    [f"/{SERVICE}/Unserved", "/test.v1.Unserved/Unary", "/", "/a", "no-slash", "/a/b/c", "*"],
)
async def test_unknown_paths_are_unimplemented(wire: Wire, path: str) -> None:
    rpc = _request(wire, path=path)
    ended = await rpc.end()
    assert (ended[":status"], ended["grpc-status"]) == ("200", str(int(Code.UNIMPLEMENTED)))
    assert ended["content-type"] == "application/grpc"
    assert unquote(ended["grpc-message"]) == f"this server has no method {path.removeprefix('/')}"
    assert len([f for f in wire.frames if f.stream == rpc.stream and f.kind == Kind.HEADERS]) == 1


@pytest.mark.parametrize("raw", [b"/\xff", b"/test.v1.Interop/\xc0\x80", b"\xfe", b"/a/%ff\x80"])
async def test_a_path_that_is_no_text_ends_that_rpc_alone(wire: Wire, raw: bytes) -> None:
    open_one = wire.rpc(BIDI)
    fields = [(":path", raw) if name == ":path" else (name, v) for name, v in request_fields(UNARY)]
    rpc = wire.rpc(fields=fields)
    rpc.send(b"", end=True)
    assert await rpc.code() == Code.INTERNAL
    open_one.send(ask(2))
    assert await open_one.next() == bytes(2)


# ---- deadlines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["1H", "1M", "9S", "9000m", "9000000u", "99999999n", "99999999H"])
async def test_timeouts_in_every_unit(wire: Wire, value: str) -> None:
    assert await _request(wire, grpc_timeout=value).code() == Code.OK


@pytest.mark.parametrize("value", ["50m", "50000u", "1n", "0S"])
async def test_a_deadline_that_passes(wire: Wire, value: str) -> None:
    rpc = wire.rpc(UNARY, [("grpc-timeout", value)])
    rpc.send(ask(hang=True), end=True)
    ended = await rpc.end()
    assert ended["grpc-status"] == str(int(Code.DEADLINE_EXCEEDED)), ended


@pytest.mark.parametrize(
    "value", ["", "1", "S", "-1S", "+1S", "1 S", "1s", "1.5S", "1e3S", "123456789S", "٣S"]
)
async def test_timeouts_that_are_none(wire: Wire, value: str) -> None:
    ended = await _request(wire, grpc_timeout=value).end()
    assert ended["grpc-status"] == str(int(Code.INTERNAL)), ended
    assert "grpc-timeout" in unquote(ended["grpc-message"])


# ---- metadata ------------------------------------------------------------------------------------


async def _echoed(wire: Wire, *sent: tuple[str, str | bytes]) -> list[tuple[str, str]]:
    """Send metadata; return what comes back of it."""
    rpc = _request(wire, *sent)
    assert await rpc.code() == Code.OK
    trailers = wire.of(Kind.HEADERS, rpc.stream)[-1]
    return [item for item in trailers.fields if item[0] in (ECHOED, ECHOED_BIN)]


async def test_metadata_keep_their_order_and_their_doubles(wire: Wire) -> None:
    sent = [(ECHOED, "b"), (ECHOED_BIN, "AAE"), (ECHOED, "a"), (ECHOED, "b"), (ECHOED, "a,b , c")]
    assert await _echoed(wire, *sent) == sent


@pytest.mark.parametrize(
    ("sent", "values"),
    [
        ("AAEC", [b"\0\1\2"]),
        ("AAECAw==", [b"\0\1\2\3"]),
        ("AAECAw", [b"\0\1\2\3"]),
        ("+/8=", [b"\xfb\xff"]),
        ("", [b""]),
        ("AA==,AQ,Ag==", [b"\0", b"\1", b"\2"]),
        ("AA==, AQ", [b"\0", b"\1"]),
    ],
)
async def test_binary_metadata(wire: Wire, sent: str, values: list[bytes]) -> None:
    """Padded or not, and several values in one field."""
    echoed = await _echoed(wire, (ECHOED_BIN, sent))
    assert [base64.b64decode(value + "==") for _, value in echoed] == values


@pytest.mark.parametrize("value", ["!", "A", "AA=A", "\u00e9", "AAEC AwQ"])
async def test_binary_metadata_that_are_no_base64(wire: Wire, value: str) -> None:
    ended = await _request(wire, (ECHOED_BIN, value)).end()
    assert ended["grpc-status"] == str(int(Code.INTERNAL)), ended
    assert ECHOED_BIN in unquote(ended["grpc-message"])


@pytest.mark.parametrize("value", [b"\xff", b"a\xc0\x80", b"\xed\xa0\x80"])
async def test_metadata_that_are_no_text_end_that_rpc_alone(wire: Wire, value: bytes) -> None:
    open_one = wire.rpc(BIDI)
    ended = await _request(wire, (ECHOED, value)).end()
    assert ended["grpc-status"] == str(int(Code.INTERNAL)), ended
    assert ECHOED in unquote(ended["grpc-message"])
    open_one.send(ask(2))
    assert await open_one.next() == bytes(2)


@pytest.mark.parametrize("values", [1, 4, 13])
async def test_too_much_metadata_ends_that_rpc_alone(wire: Wire, values: int) -> None:
    """16 KiB to 200 KiB: behind a proxy the other RPCs are other callers'."""
    open_one = wire.rpc(BIDI)
    ended = await _request(wire, *[("x-long", "x" * (16 << 10))] * values).end()
    assert ended["grpc-status"] == str(int(Code.RESOURCE_EXHAUSTED)), ended
    assert "16384" in unquote(ended["grpc-message"])
    open_one.send(ask(2))
    assert await open_one.next() == bytes(2)


async def test_metadata_are_counted_before_they_are_looked_at(wire: Wire) -> None:
    """A name of the compression's table costs its sender a byte each time."""
    long = ("n" * 4000, " ")
    for more, code in (([long] * 15, Code.RESOURCE_EXHAUSTED), ([long], Code.INTERNAL)):
        ended = await _request(wire, *more).end()
        assert ended["grpc-status"] == str(int(code)), ended
    assert "begins or ends with a blank" in unquote(ended["grpc-message"])


async def test_no_text_many_times_is_one_line_of_log(
    wire: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    """A field that the HPACK table repeats: a few bytes a copy."""
    for _ in range(50):
        rpc = _request(wire, *[("x-again", b"\xff\xfe")] * 100)
        assert await rpc.code() == Code.INTERNAL
    assert len(caplog.records) <= 1


# ---- endings -------------------------------------------------------------------------------------


async def test_a_reset_cancels_the_handler(wire: Wire, served: InteropServer) -> None:
    before = served.interop.cancelled
    for path in (UNARY, BIDI):
        rpc = wire.rpc(path)
        rpc.send(ask(1, hang=True), end=True)
        if path == BIDI:
            await rpc.next()
        else:
            await wire.answered()
        rpc.reset()
    await until(lambda: served.interop.cancelled == before + 2)


async def test_messages_of_statuses_are_percent_encoded(wire: Wire) -> None:
    text = "100 % of\tlines\r\n ☺ 😈 ~"
    rpc = wire.rpc(UNARY)
    rpc.send(ask(code=9, message=text), end=True)
    sent = (await rpc.end())["grpc-message"]
    assert sent == "100 %25 of%09lines%0D%0A %E2%98%BA %F0%9F%98%88 ~"
    assert unquote(sent) == text


async def test_details_of_statuses(wire: Wire) -> None:
    rpc = wire.rpc(f"/{SERVICE}/Unserved", end=True)
    ended = await rpc.end()
    raw = ended["grpc-status-details-bin"]
    status = status_pb2.Status.FromString(base64.b64decode(raw + "=" * (-len(raw) % 4)))
    assert (status.code, status.message) == (12, unquote(ended["grpc-message"]))
    info = error_details_pb2.ErrorInfo()
    assert any(detail.Unpack(info) for detail in status.details)
    assert info.reason == "UNKNOWN_METHOD"


async def test_what_ends_before_its_client_keeps_no_stream(wire: Wire) -> None:
    """More RPCs than streams may be open; none of them is ended by the client."""
    for _ in range(3 * STREAMS):
        rpc = wire.rpc(f"/{SERVICE}/Unserved")
        assert await rpc.code() == Code.UNIMPLEMENTED
    ends = {f.error_code for f in wire.frames if f.kind == Kind.RST_STREAM}
    assert ends <= {ErrorCode.NO_ERROR}


async def test_headers_in_many_frames(wire: Wire) -> None:
    block = wire.block([*request_fields(UNARY), (ECHOED, "x" * 300)])
    *parts, last = [block[i : i + 10] for i in range(0, len(block), 10)]
    stream, wire.next_stream = wire.next_stream, wire.next_stream + 2
    wire.send(frame(Kind.HEADERS, stream, b""))
    wire.send(*(frame(Kind.CONTINUATION, stream, part) for part in parts))
    wire.send(frame(Kind.CONTINUATION, stream, last, END_HEADERS))
    rpc = Rpc(wire, stream)
    rpc.send(ask(1), end=True)
    assert (await rpc.end())[ECHOED] == "x" * 300
