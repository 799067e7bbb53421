"""A Processor that fails as it is told to, part by part of its answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from millstream.v1 import generation_pb2, processor_pb2, processor_pb2_grpc
from millstream_server.runtime.errors import Code, StatusError
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.transport.options import TransportOptions
from millstream_testing.fake_processor import FakeProcessor
from tests.support.clients.clients import tell_serving

Part = Callable[[Call], Awaitable[str | None]]
"""One thing a turn does: answers with text, or fails."""


def text(words: str) -> Part:
    async def part(_: Any) -> str:
        return words

    return part


def fail(error: Exception) -> Part:
    async def part(_: Any) -> None:
        raise error

    return part


def broken(code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> Part:
    """Fail as gRPC itself does: without details."""

    async def part(_: Any) -> None:
        raise StatusError(Code(code.value[0]), "Socket closed")

    return part


async def hang(_: Any) -> None:
    await asyncio.Event().wait()


async def end(_: Any) -> None:
    """End the stream well, in the middle of a turn."""
    raise _EndError


class _EndError(Exception):
    pass


class Scripted(FakeProcessor):
    """Plays a script: one list of parts for each turn, over all streams."""

    def __init__(self, *turns: list[Part]) -> None:
        super().__init__()
        self.turns = list(turns)
        self.asked: list[processor_pb2.ChatRequest] = []
        self.asked_at_s: list[float] = []
        self.metadata: dict[str, str] = {}
        self.open = 0

    async def Chat(
        self, request_iterator: AsyncIterator[processor_pb2.ChatRequest], call: Any
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        self.streams += 1
        self.open += 1
        self.metadata = dict(call.metadata)
        turn = 0
        try:
            async for request in request_iterator:
                turn += 1
                self.asked.append(request)
                self.asked_at_s.append(time.monotonic())
                for part in self.turns.pop(0):
                    if words := await part(call):
                        delta = processor_pb2.ChoiceDelta(text=words, token_count=1)
                        yield processor_pb2.ChatResponse(turn=turn, choices=[delta])
                yield processor_pb2.ChatResponse(
                    turn=turn,
                    choices=[
                        processor_pb2.ChoiceDelta(finish_reason=generation_pb2.FINISH_REASON_STOP)
                    ],
                    finished=processor_pb2.TurnFinished(),
                )
        except _EndError:
            return
        finally:
            self.open -= 1

    async def ListModels(
        self, request: processor_pb2.ListModelsRequest, call: Any
    ) -> processor_pb2.ListModelsResponse:
        self.metadata = dict(call.metadata)
        self.asked_at_s.append(time.monotonic())
        for part in self.turns.pop(0):
            await part(call)
        return processor_pb2.ListModelsResponse()


@contextlib.asynccontextmanager
async def serving(script: Scripted, address: str = "127.0.0.1:0") -> AsyncIterator[str]:
    server = Server(
        ("millstream.v1.ProcessorService",),
        ServerOptions(
            max_receive_bytes=4 << 20, clients=TransportOptions(max_receive_bytes=4 << 20)
        ),
    )
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(script, server.methods)
    port = await server.listen(address)
    await tell_serving(server, serving=True)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
