"""A Processor of the test's process on one more port, with other options."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from millstream_server.processor import app
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.transport.options import TransportOptions
from millstream_testing.in_process import InProcessProcessor, make_fleet

OPTIONS = TransportOptions(max_receive_bytes=1 << 20)


@contextlib.asynccontextmanager
async def another(
    front: InProcessProcessor, *, page: bool = True, auth: AuthPolicy | None = None
) -> AsyncIterator[int]:
    """Serve the same on another port."""
    options = ServerOptions(max_receive_bytes=1 << 20, clients=OPTIONS, auth=auth or AuthPolicy())
    server = Server(app.SERVICES, options)
    app.add_services(server, front.core, make_fleet([])[1], page=page)
    port = await server.listen("127.0.0.1:0")
    try:
        yield port
    finally:
        await server.stop(0)
