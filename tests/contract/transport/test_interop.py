"""gRPC's interop cases, with both of grpcio's clients.

They have their names from grpc/grpc's doc/interop-test-descriptions.md. We compress no responses,
so of `server_compressed_*` there is only that a client that accepts gzip is served.
"""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
import pytest_asyncio

from millstream_testing.waiting import until
from tests.support.wire.interop_service import (
    ECHOED,
    ECHOED_BIN,
    SERVICE,
    AioCaller,
    Caller,
    End,
    Interop,
    Plan,
    SyncCaller,
    ask,
)
from tests.support.wire.transports import serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

OK = grpc.StatusCode.OK
_LARGE, _SMALL = (31_415, 9, 2_653, 58_979), (27_182, 8, 1_828, 45_904)


@dataclass(frozen=True)
class Served:
    """A running server and both clients."""

    interop: Interop
    callers: dict[str, Caller]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    interop = Interop()
    async with serving({SERVICE: interop.handlers()}) as server:
        target = f"127.0.0.1:{server.port}"
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.insecure_channel(target, options=options) as channel:
            async with grpc.aio.insecure_channel(target, options=options) as aio:
                yield Served(interop, {"aio": AioCaller(aio), "sync": SyncCaller(channel)})


@pytest.fixture(params=["aio", "sync"])
def client(served: Served, request: pytest.FixtureRequest) -> Caller:
    return served.callers[request.param]


def _sizes(end: End) -> list[int]:
    assert end.code is OK, end
    return [len(response) for response in end.responses]


async def test_empty_unary(client: Caller) -> None:
    end = await client.call(Plan("Empty", [b""]))
    assert (end.code, end.responses) == (OK, [b""])


async def test_large_unary(client: Caller) -> None:
    end = await client.call(Plan("Unary", [ask(314_159, payload=bytes(271_828))]))
    assert _sizes(end) == [314_159]


async def test_client_streaming(client: Caller) -> None:
    requests = [ask(payload=bytes(size)) for size in _SMALL]
    end = await client.call(Plan("ClientStream", requests))
    assert (end.code, end.responses) == (OK, [b"74922"])


async def test_server_streaming(client: Caller) -> None:
    assert _sizes(await client.call(Plan("ServerStream", [ask(*_LARGE)]))) == [*_LARGE]


async def test_ping_pong(client: Caller) -> None:
    pairs = zip(_LARGE, _SMALL, strict=True)
    requests = [ask(size, payload=bytes(sent)) for size, sent in pairs]
    assert _sizes(await client.call(Plan("Bidi", requests, lockstep=True))) == [*_LARGE]


async def test_empty_stream(client: Caller) -> None:
    assert _sizes(await client.call(Plan("Bidi"))) == []


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.NoCompression])
async def test_client_and_server_compressed_unary(
    client: Caller, algorithm: grpc.Compression
) -> None:
    plan = Plan("Unary", [ask(314_159, payload=bytes(271_828))], options={"compression": algorithm})
    assert _sizes(await client.call(plan)) == [314_159]


async def test_client_compressed_streaming(client: Caller) -> None:
    requests = [ask(payload=bytes(size)) for size in _SMALL]
    options = {"compression": grpc.Compression.Gzip}
    end = await client.call(Plan("ClientStream", requests, options=options))
    assert (end.code, end.responses) == (OK, [b"74922"])


async def test_server_compressed_streaming(client: Caller) -> None:
    options = {"metadata": [("grpc-accept-encoding", "gzip")]}
    end = await client.call(Plan("ServerStream", [ask(*_LARGE)], options=options))
    assert _sizes(end) == [*_LARGE]


async def test_cancel_after_begin(client: Caller) -> None:
    end = await client.call(Plan("ClientStream", cancel_after=0))
    assert (end.code, end.responses) == (grpc.StatusCode.CANCELLED, [])


async def test_cancel_after_first_response(client: Caller, served: Served) -> None:
    before = served.interop.cancelled
    requests = [ask(31_415, payload=bytes(27_182), hang=True)]
    end = await client.call(Plan("Bidi", requests, lockstep=True, cancel_after=1))
    assert (end.code, len(end.responses)) == (grpc.StatusCode.CANCELLED, 1)
    await until(lambda: served.interop.cancelled == before + 1)


async def test_timeout_on_sleeping_server(client: Caller, served: Served) -> None:
    before = served.interop.cancelled
    requests = [ask(31_415, payload=bytes(27_182), hang=True)]
    end = await client.call(Plan("Bidi", requests, options={"timeout": 0.1}))
    assert end.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await until(lambda: served.interop.cancelled == before + 1)


@pytest.mark.parametrize("method", ["Unary", "Bidi"])
async def test_custom_metadata(client: Caller, method: str) -> None:
    sent = [(ECHOED, "test_initial_metadata_value"), (ECHOED_BIN, b"\x0a\x0b\x0a\x0b\x0a\x0b")]
    end = await client.call(Plan(method, [ask(9)], options={"metadata": sent}))
    assert _sizes(end) == [9]
    assert [item for item in end.trailers if item[0] in (ECHOED, ECHOED_BIN)] == sent


@pytest.mark.parametrize("method", ["Unary", "ServerStream", "Bidi"])
@pytest.mark.parametrize(
    "message",
    ["test status message", "\t\nblanks\r\n ☺ and 😈 100 % \t\n"],
    ids=["plain", "special"],
)
async def test_status_code_and_message(client: Caller, method: str, message: str) -> None:
    """Also special_status_message."""
    end = await client.call(Plan(method, [ask(code=2, message=message)]))
    assert (end.code, end.details) == (grpc.StatusCode.UNKNOWN, message)


@pytest.mark.parametrize("service", [SERVICE, "test.v1.Unserved"])
async def test_unimplemented_method_and_service(client: Caller, service: str) -> None:
    end = await client.call(Plan("Unserved", [b""], service=service))
    assert end.code is grpc.StatusCode.UNIMPLEMENTED
    assert f"{service}/Unserved" in end.details


async def test_a_message_that_expands_beyond_the_limit(client: Caller) -> None:
    """Sent, it's small: 2 MiB of zeros where the limit is 1 MiB."""
    assert len(gzip.compress(bytes(2 << 20))) < 1 << 14
    plan = Plan("Empty", [bytes(2 << 20)], options={"compression": grpc.Compression.Gzip})
    assert (await client.call(plan)).code is grpc.StatusCode.RESOURCE_EXHAUSTED
