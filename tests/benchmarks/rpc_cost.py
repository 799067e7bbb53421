"""What does an RPC cost the process that serves it, beside grpc.aio itself?

    python -m tests.benchmarks.rpc_cost
    python -m tests.benchmarks.rpc_cost --rounds 20 --streams 3000

A stream of one request and two responses, 64 at once, on a bare grpc.aio server and on ours with
every layer that a Processor has (telemetry, API keys, load reports, limits). It is CPU time of the
serving process, which does nothing else. The two servers take turns; the cheapest round of each
counts, since other processes on the machine only ever add to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import grpc
import uvloop
from google.protobuf.wrappers_pb2 import StringValue

from millstream.v1 import worker_pb2
from millstream_server.runtime.rpc.limits import RpcLimits
from millstream_server.runtime.rpc.server import Server, ServerOptions
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.security.auth import AuthPolicy
from millstream_server.runtime.telemetry.load_meter import LoadMeter

SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].full_name
"""One that reflection can describe; its method is ours."""
METHOD = f"/{SERVICE}/WatchLoad"
KEY = "k" * 32
AT_ONCE = 64


async def _twice(requests: AsyncIterator[Any], _call: Any) -> AsyncIterator[Any]:
    async for request in requests:
        yield request
        yield request


def _handlers() -> Any:
    method = grpc.stream_stream_rpc_method_handler(
        _twice, StringValue.FromString, StringValue.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, {"WatchLoad": method})


async def _bare() -> tuple[Any, int]:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port


async def _ours() -> tuple[Any, int]:
    options = ServerOptions(
        max_receive_bytes=1 << 20,
        auth=AuthPolicy(keys=ApiKeys(inline=f"alice:{KEY}")),
        limits=RpcLimits(),
        load=LoadMeter(lambda: 0.5),
    )
    server = Server((SERVICE,), options)
    server.grpc.add_generic_rpc_handlers((_handlers(),))
    return server, await server.listen("127.0.0.1:0")


def _serve(kind: str, pipe: Connection) -> None:
    """Serve, and report the CPU seconds used so far whenever asked."""

    async def main() -> None:
        server, port = await (_bare() if kind == "bare" else _ours())
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


def measure(rounds: int, streams: int) -> dict[str, float]:
    """Return the CPU microseconds of an RPC in the cheapest round, by kind of server."""
    servers = [Served("bare"), Served("ours")]
    found: dict[str, list[float]] = {served.kind: [] for served in servers}
    try:
        for number in range(rounds + 1):
            for served in servers:
                before = served.cpu_s()
                uvloop.run(_load(served.port, streams))
                if number:  # the first warms up
                    found[served.kind].append(1e6 * (served.cpu_s() - before) / streams)
    finally:
        for served in servers:
            served.stop()
    return {kind: min(values) for kind, values in found.items()}


def main() -> int:
    """Parse arguments, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="of each server (10)")
    parser.add_argument("--streams", type=int, default=1000, help="RPCs a round (1000)")
    arguments = parser.parse_args()
    cost = measure(arguments.rounds, arguments.streams)
    cost["added"] = cost["ours"] - cost["bare"]
    text = json.dumps({f"{kind}_us": round(value, 1) for kind, value in cost.items()})
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
