"""A service that reports its load, with one method of every kind, and clients that read reports.

grpcio's client takes the trailer for itself and hides it from the application, so what is in it is
read with another client, `buf curl`.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.wrappers_pb2 import StringValue
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2_grpc

from millstream.orca import load_report_pb2
from millstream_server.runtime.errors import (
    Code,
    InvalidRequestError,
    OverloadedError,
    StatusError,
)
from millstream_server.runtime.rpc import orca
from millstream_server.runtime.rpc.call import Call, Layer
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.orca import OrcaLayer, OrcaServicer
from millstream_server.runtime.rpc.reflection import add_reflection
from millstream_server.runtime.telemetry.counts import LoadSnapshot, LoadSource
from tests.support.wire.transports import new_server

NAMED = "test.Named"
LOAD = LoadSnapshot(
    application_utilization=0.5,
    cpu_utilization=0.25,
    mem_utilization=0.125,
    rps=8,
    eps=2,
)


# ---- a service with one method of every kind, and of every end


class Named:
    """Answers with the server's name."""

    def __init__(self, name: str) -> None:
        self.answer = StringValue(value=name)
        self.held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.holding = False

    async def unary(self, request: Any, call: Call) -> StringValue:
        return self.answer

    async def client_stream(self, requests: Any, call: Call) -> StringValue:
        async for _ in requests:
            pass
        return self.answer

    async def generator(self, request: Any, call: Call) -> AsyncIterator[StringValue]:
        yield self.answer
        yield self.answer

    async def bidi(self, requests: Any, call: Call) -> AsyncIterator[StringValue]:
        async for _ in requests:
            yield self.answer

    async def own_trailer(self, request: Any, call: Call) -> StringValue:
        call.add_trailer("own", "kept")
        return self.answer

    async def refuses(self, request: Any, call: Call) -> StringValue:
        call.add_trailer("own", "kept")
        raise OverloadedError("no room for this test", retry_delay_s=2)

    async def refuses_the_caller(self, request: Any, call: Call) -> StringValue:
        raise InvalidRequestError.of("name", "is not a name")

    async def breaks_midway(self, request: Any, call: Call) -> AsyncIterator[StringValue]:
        yield self.answer
        raise ValueError("a fault of ours")

    async def raises_a_status(self, request: Any, call: Call) -> StringValue:
        raise StatusError(Code.DATA_LOSS, "gone")

    async def holds(self, request: Any, call: Call) -> AsyncIterator[StringValue]:
        yield self.answer
        self.holding = True
        await self.held

    def handlers(self) -> Any:
        unary, stream = (
            grpc.unary_unary_rpc_method_handler,
            grpc.unary_stream_rpc_method_handler,
        )
        kinds: dict[Any, list[Any]] = {
            unary: [
                *(self.unary, self.own_trailer, self.raises_a_status),
                *(self.refuses, self.refuses_the_caller),
            ],
            stream: [self.generator, self.breaks_midway, self.holds],
            grpc.stream_unary_rpc_method_handler: [self.client_stream],
            grpc.stream_stream_rpc_method_handler: [self.bidi],
        }
        return grpc.method_handlers_generic_handler(
            NAMED,
            {
                behavior.__name__: make(
                    behavior,
                    request_deserializer=StringValue.FromString,
                    response_serializer=StringValue.SerializeToString,
                )
                for make, behaviors in kinds.items()
                for behavior in behaviors
            },
        )


@dataclass(frozen=True)
class Running:
    port: int
    orca: OrcaServicer
    server: Any
    named: Named


@contextlib.asynccontextmanager
async def served(
    name: str,
    source: LoadSource = lambda: LOAD,
    *,
    trailers: bool = True,
    seen: Counter[str] | None = None,
) -> AsyncIterator[Running]:
    """Serve `Named`, health, reflection and reports."""
    layers: list[Layer] = [OrcaLayer(source, [NAMED])] if trailers else []
    if seen is not None:
        layers.insert(0, Seen(seen))
    server = new_server(*layers)
    named = Named(name)
    server.add_generic_rpc_handlers((named.handlers(),))
    health = HealthServicer(())
    health.set(serving=True)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    reflection = add_reflection(server, [orca.SERVICE])
    servicer = orca.add_orca(server, source)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield Running(port, servicer, server, named)
    finally:
        servicer.close()
        health.close()
        reflection.close()
        await server.stop(0)


class Seen:
    """Counts the calls of each method."""

    def __init__(self, seen: Counter[str]) -> None:
        self._seen = seen

    def covers(self, method: str) -> bool:
        return True

    def enter(self, call: Call) -> None:
        self._seen[call.method] += 1


def call_named(channel: grpc.aio.Channel, method: str, kind: str = "unary_unary") -> Any:
    multi = getattr(channel, kind)(
        f"/{NAMED}/{method}",
        request_serializer=StringValue.SerializeToString,
        response_deserializer=StringValue.FromString,
    )
    return multi([StringValue(), StringValue()] if kind.startswith("stream") else StringValue())


# ---- a client that shows every trailer


Trailers = dict[str, Any]


class Curl:
    """Calls methods of `Named` with `buf curl`."""

    def __init__(self, directory: Path) -> None:
        self._schema = directory
        self._streams_in = ("bidi", "client_stream")
        streams_out = ("bidi", "generator", "breaks_midway", "holds")
        plain = ("unary", "own_trailer", "refuses", "raises_a_status")
        message = "google.protobuf.StringValue"
        rpcs = (
            f"rpc {name}({'stream ' * (name in self._streams_in)}{message})"
            f" returns ({'stream ' * (name in streams_out)}{message});"
            for name in {*self._streams_in, *streams_out, *plain}
        )
        (directory / "named.proto").write_text(
            'syntax = "proto3"; package test; import "google/protobuf/wrappers.proto";'
            f"service Named {{ {' '.join(rpcs)} }}"
        )

    async def __call__(self, port: int, method: str) -> Trailers:
        """Answer the headers and trailers, decoded, and how many "A"s came under "answers"."""
        sent = '"" ""' if method in self._streams_in else '""'
        return await buf_curl(f"{port}/{NAMED}/{method}", sent, "--schema", str(self._schema))


async def buf_curl(to: str, sent: str, *options: str) -> Trailers:
    buf = str(Path(sys.executable).with_name("buf"))
    plain = ("--protocol", "grpc", "--http2-prior-knowledge")
    process = await asyncio.create_subprocess_exec(
        *(buf, "curl", "-v", *plain, *options, "-d", sent, f"http://127.0.0.1:{to}"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    answers, log = await process.communicate()
    text = log.decode()
    calls = re.findall(r"> \((#\d+)\) POST", text)
    assert calls, text
    ours = calls[-1]  # those before ask for reflection
    found: Trailers = {"answers": answers.decode().count('"A"')}
    for name, value in re.findall(rf"< \({ours}\) ([\w-]+): ?(.*)", text):
        assert name not in found, "a trailer twice"
        found[name] = base64.b64decode(value + "==") if name.endswith("-Bin") else value
    return found


def report_in(trailers: Trailers) -> Any:
    return load_report_pb2.OrcaLoadReport.FromString(trailers["Endpoint-Load-Metrics-Bin"])


def reason_in(trailers: Trailers) -> str:
    status = status_pb2.Status.FromString(trailers["Grpc-Status-Details-Bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return str(info.reason)


def channel_to(*ports: int, config: dict[str, Any] | None = None) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(
        "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports),
        options=[("grpc.service_config", json.dumps(config or {}))],
    )
