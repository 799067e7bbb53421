"""A server of three RPCs of the contract, which do what a text says, and callers of it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import grpc
import httpx

from millstream.v1 import processor_pb2
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError
from millstream_server.runtime.rpc.call import Call, Layer
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server

SERVICE = "millstream.v1.ProcessorService"
UNARY, STREAM, BIDI = f"/{SERVICE}/Tokenize", f"/{SERVICE}/Complete", f"/{SERVICE}/Parse"
PROTO, JSON = "application/proto", "application/json"
WEB, TEXT = "application/grpc-web+proto", "application/grpc-web-text+proto"
CONNECT, CONNECT_JSON = "application/connect+proto", "application/connect+json"
"""Content types."""
OPTIONS = TransportOptions(max_receive_bytes=1 << 20)
Version = Literal["1.1", "2"]


class _Texts:
    """A source of messages, one per word."""

    gathers = False

    def __init__(self, call: Call, words: Sequence[str]) -> None:
        self._call = call
        self._left = list(words)

    @property
    def over(self) -> bool:
        return not self._left

    def next(self) -> Any:
        word = self._left.pop(0)
        if word == "bad":
            raise OverloadedError("no more", retry_delay_s=2.5)
        if self._left:
            self._call.ready()
        size = int(word) if word.isdigit() else 0
        response = processor_pb2.CompleteResponse()
        response.choices.add(text="x" * size or word)
        return response


@dataclass
class WebService:
    """The servicer, and what it has seen."""

    server: H2Server
    port: int = 0
    cancelled: int = 0
    waiting: int = 0
    metadata: list[tuple[str, str | bytes]] = field(default_factory=list)
    time_left_s: float | None = None

    async def _hang(self) -> None:
        self.waiting += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def tokenize(
        self, request: processor_pb2.TokenizeRequest, call: Call
    ) -> processor_pb2.TokenizeResponse:
        self.metadata, self.time_left_s = list(call.metadata), call.time_left_s
        call.add_trailer("x-cost", "7")
        call.add_trailer("x-raw-bin", b"\xff\0")
        if request.text == "hang":
            await self._hang()
        if request.text == "bad":
            raise InvalidRequestError.of("text", "is bad")
        if request.text == "bug":
            raise LookupError("a bug")
        size = int(request.text) if request.text.isdigit() else len(request.text)
        return processor_pb2.TokenizeResponse(token_ids=range(size))

    async def complete(self, request: processor_pb2.CompleteRequest, call: Call) -> None:
        call.add_trailer("x-cost", "7")
        if request.text == "hang":
            await self._hang()
        call.ready()
        await call.send_from(_Texts(call, request.text.split()))

    async def parse(
        self, requests: AsyncIterator[processor_pb2.ParseRequest], _call: Call
    ) -> AsyncIterator[processor_pb2.ParseResponse]:
        async for request in requests:
            response = processor_pb2.ParseResponse()
            response.events.add(text=request.text)
            yield response

    def handlers(self) -> dict[str, Any]:
        return {
            "Tokenize": grpc.unary_unary_rpc_method_handler(
                self.tokenize,
                processor_pb2.TokenizeRequest.FromString,
                processor_pb2.TokenizeResponse.SerializeToString,
            ),
            "Complete": grpc.unary_stream_rpc_method_handler(
                self.complete,
                processor_pb2.CompleteRequest.FromString,
                processor_pb2.CompleteResponse.SerializeToString,
            ),
            "Parse": grpc.stream_stream_rpc_method_handler(
                self.parse,
                processor_pb2.ParseRequest.FromString,
                processor_pb2.ParseResponse.SerializeToString,
            ),
        }


@contextlib.asynccontextmanager
async def web_service(
    options: TransportOptions = OPTIONS, layers: Sequence[Layer] = ()
) -> AsyncIterator[WebService]:
    server = H2Server(Rpcs(layers, (SERVICE,)), options)
    service = WebService(server)
    server.add_registered_method_handlers(SERVICE, service.handlers())
    service.port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield service
    finally:
        await server.stop(None)


@contextlib.asynccontextmanager
async def caller(port: int, version: Version) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{port}",
        http1=version == "1.1",
        http2=version == "2",
        trust_env=False,
        verify=False,  # noqa: S501 - without TLS; to read the CAs takes 0.1 s
        timeout=10,
    ) as client:
        yield client


async def call(
    client: httpx.AsyncClient, path: str, content_type: str, body: bytes, **headers: str
) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await client.post(path, content=body, headers={"content-type": content_type, **named})


def asked(text: str) -> bytes:
    return processor_pb2.CompleteRequest(text=text).SerializeToString()


def frame(payload: bytes, flags: int = 0) -> bytes:
    return bytes([flags]) + len(payload).to_bytes(4) + payload


def frames(body: bytes) -> list[tuple[int, bytes]]:
    """Divide a body into flags and payloads."""
    found = []
    while body:
        size = int.from_bytes(body[1:5])
        assert len(body) >= 5 + size
        found.append((body[0], body[5 : 5 + size]))
        body = body[5 + size :]
    return found


def from_base64(body: bytes) -> bytes:
    """Decode frames that are padded one by one."""
    ends = [at + 4 for at in range(0, len(body), 4) if body[at + 3 : at + 4] == b"="]
    parts = [body[a:b] for a, b in zip([0, *ends], [*ends, len(body)], strict=True)]
    return b"".join([base64.b64decode(part, validate=True) for part in parts])


def trailers(payload: bytes) -> dict[str, str]:
    """Read gRPC-web's last frame."""
    lines = payload.decode("ascii").removesuffix("\r\n").split("\r\n")
    return dict(line.split(": ", 1) for line in lines)


def texts(messages: Sequence[bytes], *, json_: bool = False) -> list[str]:
    """Return the texts of responses of Complete."""
    if json_:
        return [json.loads(each)["choices"][0]["text"] for each in messages]
    return [processor_pb2.CompleteResponse.FromString(each).choices[0].text for each in messages]
