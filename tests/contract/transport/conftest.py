"""One server of the interop service on the transport of our own, and raw connections to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest
import pytest_asyncio

from millstream_testing.waiting import until
from tests.support.wire.interop_service import SERVICE, Interop, ask
from tests.support.wire.raw_http2 import Wire, connected
from tests.support.wire.transports import serving
from tests.support.wire.web_service import (
    JSON,
    Version,
    WebService,
    call,
    caller,
    web_service,
)
from tests.support.wire.web_service import UNARY as TOKENIZE

UNARY = f"/{SERVICE}/Unary"
LIMIT = 1 << 20
STREAMS = 20


@dataclass(frozen=True)
class InteropServer:
    """A running server."""

    port: int
    interop: Interop


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[InteropServer]:
    interop = Interop()
    services = {SERVICE: interop.handlers()}
    async with serving(services, max_receive_bytes=LIMIT, max_streams=STREAMS) as server:
        yield InteropServer(server.port, interop)


@pytest_asyncio.fixture(loop_scope="module")
async def wire(served: InteropServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Wire]:
    """Check after each test that the same connection serves on, and that no error was logged."""
    async with connected(served.port) as opened:
        yield opened
        rpc = opened.rpc(UNARY)
        rpc.send(ask(3), end=True)
        assert await rpc.code() == 0, str(opened)
        assert rpc.messages == [bytes(3)]
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == []


# ---- gRPC-web and Connect ------------------------------------------------------------------------


@pytest_asyncio.fixture
async def service() -> AsyncIterator[WebService]:
    async with web_service() as served:
        yield served


@pytest.fixture(params=["1.1", "2"])
def version(request: pytest.FixtureRequest) -> Version:
    found: Version = request.param
    return found


@pytest_asyncio.fixture
async def client(service: WebService, version: Version) -> AsyncIterator[httpx.AsyncClient]:
    """Call by a version of HTTP; afterwards nothing is held, and the same client is served."""
    async with caller(service.port, version) as opened:
        yield opened
        again = await call(opened, TOKENIZE, JSON, b'{"text": "abc"}')
        assert (again.status_code, again.json()) == (200, {"tokenIds": [0, 1, 2]})
    await until(lambda: not service.server.connections)
    bounds = service.server.bounds
    assert bounds.streams.used == bounds.silent.used == 0
    assert bounds.received.used == bounds.unsent.used == 0
