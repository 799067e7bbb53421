"""The HTTP door on its own, inside the test's process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from millstream_server.door.app import make_pipeline
from millstream_server.door.processors import Processors
from millstream_server.processor.http.door import Door
from millstream_server.processor.open_calls import OpenCalls
from millstream_server.processor.output import Pacer
from millstream_server.processor.text.fair_queue import TextLimits
from millstream_server.processor.text.threads import TextThreads
from millstream_server.routing.discovery.sources import StaticDiscovery
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.runtime.transport.options import TransportOptions
from millstream_testing.waiting import until

_BYTES = 4 << 20


@dataclass
class InProcessDoor:
    """A door; all of its requests are counted in ``calls``."""

    port: int
    processors: Processors
    calls: OpenCalls

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


@contextlib.asynccontextmanager
async def door(
    *addresses: str, serving: bool = True, tracing: Tracing | None = None
) -> AsyncIterator[InProcessDoor]:
    """Serve HTTP over the Processors at these addresses; wait until one of them is ``serving``."""
    processors = Processors(StaticDiscovery(addresses), lambda: None, tracing=tracing)
    calls, pacer, threads = OpenCalls(), Pacer(0.05), TextThreads(TextLimits())
    pipeline = make_pipeline(processors, calls, pacer, threads, max_open_bytes=64 << 20)
    server = Server(
        (),
        ServerOptions(
            max_receive_bytes=_BYTES,
            clients=TransportOptions(max_receive_bytes=_BYTES),
            auth=AuthPolicy(forwards=True),
            tracing=tracing,
        ),
    )
    Door(pipeline, page=True).register(server)
    port = await server.listen("127.0.0.1:0")
    processors.open()
    pacer.open()
    try:
        if serving:
            await until(lambda: processors.serving)
        yield InProcessDoor(port, processors, calls)
    finally:
        await server.stop(0)
        await pacer.close()
        await processors.close()
        threads.close()
