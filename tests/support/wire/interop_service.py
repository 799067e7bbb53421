"""What gRPC's interop descriptions ask of a server, and a client to ask it with.

The cases are those of grpc/grpc's doc/interop-test-descriptions.md. Messages are bytes: a line of
JSON with what the server shall do (`ask`), then a payload. Servicers of this project send no
initial metadata, so that all metadata is echoed in the trailers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc

from millstream_server.runtime.errors import Code, StatusError
from millstream_server.runtime.rpc.call import Call
from millstream_testing.waiting import EOF

SERVICE = "test.v1.Interop"
KINDS = {
    "Empty": "unary_unary",
    "Unary": "unary_unary",
    "ServerStream": "unary_stream",
    "ClientStream": "stream_unary",
    "Bidi": "stream_stream",
    "Unserved": "unary_unary",
}
ECHOED, ECHOED_BIN = "x-echoed", "x-echoed-bin"
_LIMIT_S = 20.0


def ask(
    *sizes: int, payload: bytes = b"", code: int = 0, message: str = "", hang: bool = False
) -> bytes:
    """Make a request: responses of these sizes, then a status; or no end at all."""
    wanted = {"sizes": sizes, "code": code, "message": message, "hang": hang}
    return json.dumps(wanted).encode() + b"\n" + payload


class Interop:
    """The servicer."""

    def __init__(self) -> None:
        self.cancelled = 0

    async def _answers(self, request: bytes, call: Call) -> AsyncIterator[bytes]:
        line, _, _ = request.partition(b"\n")
        wanted = json.loads(line)
        for key, value in call.metadata:
            if key in (ECHOED, ECHOED_BIN):
                call.add_trailer(key, value)
        for size in wanted["sizes"]:
            yield bytes(size)
        if wanted["hang"]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if wanted["code"]:
            raise StatusError(Code(wanted["code"]), wanted["message"])

    async def empty(self, request: bytes, call: Call) -> bytes:
        assert request == b""
        return b""

    async def unary(self, request: bytes, call: Call) -> bytes:
        return b"".join([response async for response in self._answers(request, call)])

    async def server_stream(self, request: bytes, call: Call) -> AsyncIterator[bytes]:
        async for response in self._answers(request, call):
            yield response

    async def client_stream(self, requests: AsyncIterator[bytes], call: Call) -> bytes:
        return str(sum([len(r.partition(b"\n")[2]) async for r in requests])).encode()

    async def bidi(self, requests: AsyncIterator[bytes], call: Call) -> AsyncIterator[bytes]:
        async for request in requests:
            async for response in self._answers(request, call):
                yield response

    def handlers(self) -> dict[str, Any]:
        """Return the handlers by the methods' names."""
        behaviors = {
            "Empty": self.empty,
            "Unary": self.unary,
            "ServerStream": self.server_stream,
            "ClientStream": self.client_stream,
            "Bidi": self.bidi,
        }
        return {
            name: getattr(grpc, f"{KINDS[name]}_rpc_method_handler")(behavior, bytes, bytes)
            for name, behavior in behaviors.items()
        }


@dataclass
class Plan:
    """What a client does in one RPC."""

    method: str
    requests: Sequence[bytes] = ()
    lockstep: bool = False
    """Wait for a response before each further request."""
    cancel_after: int | None = None
    """Cancel after so many responses."""
    service: str = SERVICE
    options: dict[str, Any] = field(default_factory=dict)
    """Of the call: timeout, metadata, compression."""

    @property
    def path(self) -> str:
        return f"/{self.service}/{self.method}"

    @property
    def kind(self) -> str:
        return KINDS[self.method]


@dataclass(frozen=True)
class End:
    """How an RPC ended."""

    code: grpc.StatusCode
    details: str
    responses: list[bytes]
    trailers: list[tuple[str, str | bytes]]


class Caller(Protocol):
    """A client of one kind."""

    async def call(self, plan: Plan) -> End:
        """Make an RPC."""


class AioCaller:
    """grpc.aio."""

    def __init__(self, channel: Any) -> None:
        self._channel = channel

    async def call(self, plan: Plan) -> End:
        """Make an RPC."""
        make = getattr(self._channel, plan.kind)(plan.path)
        options = {"timeout": _LIMIT_S, **plan.options}
        given = plan.requests if plan.kind.startswith("unary") else ()
        call = make(*given, **options)
        responses: list[bytes] = []
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await self._converse(call, plan, responses)
        trailers = [(str(k), v) for k, v in await call.trailing_metadata() or ()]
        return End(await call.code(), await call.details() or "", responses, trailers)

    async def _converse(self, call: Any, plan: Plan, responses: list[bytes]) -> None:
        streams = plan.kind.endswith("stream")

        async def read() -> bool:
            if plan.cancel_after == len(responses):
                call.cancel()
            response = await call.read()
            if response is not EOF:
                responses.append(response)
            return response is not EOF

        if plan.kind.startswith("stream"):
            for request in plan.requests:
                await call.write(request)
                if plan.lockstep:
                    await read()
            if plan.cancel_after == len(responses):
                call.cancel()
            await call.done_writing()
        if not streams:
            responses.append(await call)
            return
        while await read():
            pass


class SyncCaller:
    """grpcio's blocking client, in a thread."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel

    async def call(self, plan: Plan) -> End:
        """Make an RPC."""
        return await asyncio.to_thread(self._call, plan)

    def _call(self, plan: Plan) -> End:
        make = getattr(self._channel, plan.kind)(plan.path)
        options = {"timeout": _LIMIT_S, **plan.options}
        may_send: queue.SimpleQueue[None] = queue.SimpleQueue()
        may_send.put(None)
        over = threading.Event()

        def requests() -> Iterator[bytes]:
            for request in plan.requests:
                if plan.lockstep:
                    may_send.get(timeout=_LIMIT_S)
                yield request
            if plan.cancel_after is not None:
                over.wait(_LIMIT_S)

        given = requests() if plan.kind.startswith("stream") else plan.requests[0]
        call = (
            make.future(given, **options) if plan.kind.endswith("unary") else make(given, **options)
        )
        responses: list[bytes] = []
        try:
            if plan.cancel_after == 0:
                call.cancel()
            for response in [call.result()] if plan.kind.endswith("unary") else call:
                responses.append(response)
                if plan.cancel_after == len(responses):
                    call.cancel()
                may_send.put(None)
        except (grpc.RpcError, grpc.FutureCancelledError):
            pass
        finally:
            over.set()
        return End(
            call.code(), call.details() or "", responses, list(call.trailing_metadata() or ())
        )
