"""GenerateText of a simulated diffusion language model, at a worker and at a Processor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc

from millstream.v1 import diffusion_pb2_grpc
from millstream_server.engines.base import Role
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.processor.diffusion.servicer import SERVICE, DiffusionServicer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.server import Server, ServerOptions
from tests.support.in_process import (
    ALPHABET,
    MODEL,
    InProcessProcessor,
    InProcessWorker,
    processor,
    worker,
)
from tests.support.waiting import until

DLLM = replace(ALPHABET, role=Role.DIFFUSION)
STEPPING = replace(DLLM, step_s=0.005)


@dataclass
class Place:
    """A server of GenerateText, and the worker behind it."""

    stub: Any
    worker: InProcessWorker


@contextlib.asynccontextmanager
async def text_server(front: InProcessProcessor) -> AsyncIterator[Any]:
    """Serve GenerateText with a Processor's core."""
    server = Server((SERVICE,), ServerOptions(max_receive_bytes=4 << 20, load=front.core.meter))
    servicer = DiffusionServicer(front.core, None)  # type: ignore[arg-type] # nobody asks for images
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(servicer, server.grpc)
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield diffusion_pb2_grpc.DiffusionServiceStub(channel)
        finally:
            await server.stop(0)


@contextlib.asynccontextmanager
async def serving(
    place: str, text_model: TextModel, config: SimulatedConfig = DLLM
) -> AsyncIterator[Place]:
    """Serve a simulated diffusion language model."""
    async with worker(config) as one:
        if place == "worker":
            yield Place(one.diffusion, one)
            return
        async with (
            processor({MODEL: text_model}, [one.address]) as front,
            text_server(front) as stub,
        ):
            yield Place(stub, one)
            await until(lambda: not front.core.work.count)  # ended requests are no open work
