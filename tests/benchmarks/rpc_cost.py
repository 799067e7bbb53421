"""What does an RPC cost the process that serves it, on grpc.aio and on our own transport?

    python -m tests.benchmarks.rpc_cost
    python -m tests.benchmarks.rpc_cost --rounds 20 --streams 3000

A stream of one request and two responses, 64 at once, on a bare server of each transport and on
ours with every layer that a Processor has (telemetry, API keys, load reports, limits). It is CPU
time of the serving process, which does nothing else. The servers take turns; the cheapest round of
each counts, since other processes on the machine only ever add to it. `message_us_1` and `_64` are
a message's price on a bare server: 64 streams on so many connections, a message every 10 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop
from google.protobuf.wrappers_pb2 import StringValue

from millstream.v1 import worker_pb2
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.auth import AuthPolicy
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.telemetry.counts import LoadMeter
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""One that reflection can describe; its method is ours."""
METHOD, STEPS = f"/{SERVICE}/WatchLoad", f"/{SERVICE}/WatchKvEvents"
KEY = "k" * 32
AT_ONCE, STEPS_EACH = 64, 100


_STEP_S = 0.01


async def _steps(requests: AsyncIterator[Any], _call: Any) -> AsyncIterator[Any]:
    """Send as many messages as asked for, one every step, all streams at the same time."""
    loop = asyncio.get_running_loop()
    async for request in requests:
        for _ in range(int(request.value)):
            await asyncio.sleep(_STEP_S - loop.time() % _STEP_S)
            yield request


async def _twice(requests: AsyncIterator[Any], _call: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield request
        yield request


def _handlers() -> Any:
    method = grpc.stream_stream_rpc_method_handler(
        _twice, StringValue.FromString, StringValue.SerializeToString
    )
    steps = grpc.stream_stream_rpc_method_handler(
        _steps, StringValue.FromString, StringValue.SerializeToString
    )
    methods = {"WatchLoad": method, "WatchKvEvents": steps}
    return grpc.method_handlers_generic_handler(SERVICE, methods)


async def _bare_grpc() -> tuple[Any, int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def _bare_h2() -> tuple[Any, int]:
    server = H2Server(Rpcs(), TransportOptions(max_receive_bytes=1 << 20))
    server.add_generic_rpc_handlers((_handlers(),))
    port = server.bind("127.0.0.1:0")
    await server.start()
    return server, port


async def _ours(clients: TransportOptions | None) -> tuple[Any, int]:
    options = ServerOptions(
        max_receive_bytes=1 << 20,
        clients=clients,
        auth=AuthPolicy(keys=ApiKeys(inline=f"alice:{KEY}")),
        limits=RpcLimits(),
        load=LoadMeter(lambda: 0.5),
    )
    server = Server((SERVICE,), options)
    server.methods.add_generic_rpc_handlers((_handlers(),))
    return server, await server.listen("127.0.0.1:0")


_SERVERS: dict[str, Callable[[], Awaitable[tuple[Any, int]]]] = {
    "bare_grpc": _bare_grpc,
    "bare_h2": _bare_h2,
    "grpc": functools.partial(_ours, None),
    "h2": functools.partial(_ours, TransportOptions(max_receive_bytes=1 << 20)),
}


def _serve(kind: str, pipe: Connection) -> None:
    """Serve, and report the CPU seconds used so far whenever asked."""

    async def main() -> None:
        server, port = await _SERVERS[kind]()
        pipe.send(port)
        loop = asyncio.get_running_loop()
        done = asyncio.Event()

        def asked() -> None:
            if pipe.recv():
                pipe.send(time.process_time())
            else:
                done.set()

        loop.add_reader(pipe.fileno(), asked)
        await done.wait()
        await server.stop(0)

    uvloop.run(main())


class Served:
    """A serving process."""

    def __init__(self, kind: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(kind, theirs))
        self._process.start()
        self.port = int(self._pipe.recv())

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        return float(self._pipe.recv())

    def stop(self) -> None:
        self._pipe.send("")
        self._process.join(10)


async def _load(port: int, streams: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        make: Any = channel.stream_stream
        method = make(METHOD)
        data = StringValue(value="hi").SerializeToString()
        left = iter(range(streams))

        async def client() -> None:
            for _ in left:
                call = method(metadata=(("authorization", f"Bearer {KEY}"),))
                await call.write(data)
                await call.done_writing()
                count = 0
                async for _response in call:
                    count += 1
                assert count == 2

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


async def _steps_load(port: int, connections: int) -> None:
    """Receive messages that come together on all streams, spread over so many connections."""
    async with contextlib.AsyncExitStack() as stack:
        methods: list[Any] = []
        for _ in range(connections):
            channel = grpc.aio.insecure_channel(
                f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
            )
            make: Any = (await stack.enter_async_context(channel)).unary_stream
            methods.append(make(STEPS))
        data = StringValue(value=str(STEPS_EACH)).SerializeToString()

        async def client(method: Any) -> None:
            count = 0
            async for _response in method(data):
                count += 1
            assert count == STEPS_EACH

        await asyncio.gather(*(client(methods[i % connections]) for i in range(AT_ONCE)))


def measure(rounds: int, streams: int) -> dict[str, float]:
    """Return the CPU microseconds of an RPC and of a message, in the cheapest round of each."""
    servers = [Served(kind) for kind in _SERVERS]
    messages = AT_ONCE * STEPS_EACH
    found: dict[str, list[float]] = {}
    try:
        for number in range(rounds + 1):
            for served in servers:
                loads = [(f"{served.kind}_us", _load(served.port, streams), streams)]
                if served.kind.startswith("bare"):
                    loads += [
                        (f"{served.kind}_message_us_{n}", _steps_load(served.port, n), messages)
                        for n in (1, AT_ONCE)
                    ]
                for name, load, count in loads:
                    before = served.cpu_s()
                    uvloop.run(load)
                    if number:  # the first warms up
                        spent_us = 1e6 * (served.cpu_s() - before) / count
                        found.setdefault(name, []).append(spent_us)
    finally:
        for served in servers:
            served.stop()
    return {name: min(values) for name, values in found.items()}


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of each server (10)")
    parser.add_argument("--streams", type=int, default=1000, help="RPCs a round (1000)")
    arguments = parser.parse_args()
    cost = measure(arguments.rounds, arguments.streams)
    for transport in ("grpc", "h2"):
        cost[f"added_{transport}_us"] = cost[f"{transport}_us"] - cost[f"bare_{transport}_us"]
    text = json.dumps({name: round(value, 1) for name, value in cost.items()})
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
