"""What a caller can make grpc.aio log: one line a minute and cause, whatever it sends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import grpc
import h2.config
import h2.connection
import h2.events
import pytest
from grpc_health.v1 import health_pb2_grpc

from millstream_server.runtime.rpc.grpc_server import LOGGER, RpcInterceptor, plain_grpc_log
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.telemetry import log

_HEADERS = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/grpc.health.v1.Health/Check"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
_EMPTY = bytes(5)
_RPCS = 20


@pytest.fixture
def _logging() -> Iterator[None]:
    root, theirs = logging.getLogger(), logging.getLogger(LOGGER)
    handlers, level, filters = root.handlers[:], root.level, theirs.filters[:]
    yield
    root.handlers[:], root.level, theirs.filters[:] = handlers, level, filters


@pytest.mark.usefixtures("_logging")
async def test_metadata_that_is_no_text_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    """One value of 5 bytes, named 110 times per RPC through HPACK's table."""
    log.configure("info")
    plain_grpc_log()
    server = grpc.aio.server(interceptors=[RpcInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(()), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = h2.config.H2Configuration(header_encoding=None, validate_outbound_headers=False)
    client = h2.connection.H2Connection(config=config)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        client.initiate_connection()
        for number in range(_RPCS):
            stream = client.get_next_available_stream_id()
            hostile = (b"x-a", b"\xff\xfe%d" % number)
            client.send_headers(stream, [*_HEADERS, *[hostile] * 110])
            client.send_data(stream, _EMPTY, end_stream=True)
        ended = 0
        async with asyncio.timeout(10):
            while ended < _RPCS:
                writer.write(client.data_to_send())
                events = client.receive_data(await reader.read(1 << 16))
                ended += sum(isinstance(event, h2.events.StreamEnded) for event in events)
    finally:
        writer.close()
        await server.stop(None)
    (line,) = capfd.readouterr().err.splitlines()
    assert "a caller's metadata isn't UTF-8" in line
