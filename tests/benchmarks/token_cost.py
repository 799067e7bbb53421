"""What tokens cost: a worker and a Processor under so many chats, and the CPU they are charged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc, sampling_pb2
from tests.support.processes.processes import cpu_s
from tests.support.processes.suite import ServiceProcess

VOCAB_SIZE = 1024
"""Of the model that make_random_model makes."""
FEW_CONNECTIONS = 4
_PROMPT = "What is Millstream?"


@dataclass(frozen=True)
class Answer:
    """What one chat saw."""

    ttft_s: float
    tokens: int
    messages: int
    longest_pacing_s: float


@dataclass(frozen=True)
class Spent:
    """What a burst of chats took."""

    answers: Sequence[Answer]
    took_s: float
    worker_s: float
    processor_s: float
    client_s: float

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def worker_us_per_token(self) -> float:
        return self.worker_s / self.tokens * 1e6

    @property
    def processor_us_per_token(self) -> float:
        return self.processor_s / self.tokens * 1e6


def sampling(tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)


def tokens_each(streams: int, step_ms: float, seconds: float) -> int:
    """Choose how long answers are, so that a burst takes about ``seconds``."""
    rate = 1000 / step_ms if step_ms else min(6000, 300_000 / streams)
    return max(64, min(8000, int(rate * seconds)))


def services(
    model: Path,
    log: Path,
    step_ms: float,
    flags: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    processor_flags: Mapping[str, object] | None = None,
) -> tuple[ServiceProcess, ServiceProcess]:
    """Make a simulated worker and a Processor in front of it; ``flags`` and ``env`` are both's."""
    both = {"log_level": "warning", **(flags or {})}
    worker = ServiceProcess(
        "millstream_server.decode",
        {
            "engine": "simulated",
            "model_name": "tiny",
            "simulated_vocab_size": VOCAB_SIZE,
            "simulated_step_s": step_ms / 1000,
            **both,
        },
        log,
        env=env or {},
    )
    processor = ServiceProcess(
        "millstream_server.processor",
        {"models": f"tiny={model}", "workers": worker.address, **both, **(processor_flags or {})},
        log,
        env=env or {},
    )
    return worker, processor


@contextlib.asynccontextmanager
async def stubs_for(
    processor: ServiceProcess, streams: int, connections: int = FEW_CONNECTIONS
) -> AsyncIterator[list[Any]]:
    """Open channels, by default a few, as a handful of clients would; each is a connection."""
    async with contextlib.AsyncExitStack() as stack:
        stubs: list[Any] = []
        for _ in range(min(connections, streams)):
            channel = grpc.aio.insecure_channel(
                processor.address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
            await stack.enter_async_context(channel)
            stubs.append(processor_pb2_grpc.ProcessorServiceStub(channel))
        yield stubs


async def spend(
    stubs: Sequence[Any],
    worker: ServiceProcess,
    processor: ServiceProcess,
    streams: int,
    tokens: int,
    *,
    times: int = 1,
) -> Spent:
    """Run ``streams`` chats at once, so many times; counts CPU from the first to the last."""
    pids = (worker.pid, processor.pid, os.getpid())
    before = [cpu_s(pid) for pid in pids]
    began = time.perf_counter()
    answers: list[Answer] = []
    for _ in range(times):
        answers += await asyncio.gather(
            *(chat(stubs[i % len(stubs)], tokens) for i in range(streams))
        )
    took_s = time.perf_counter() - began
    return Spent(answers, took_s, *(cpu_s(p) - b for p, b in zip(pids, before, strict=True)))


async def chat(stub: Any, tokens: int) -> Answer:
    """One one-shot chat; counts what comes back."""
    request = processor_pb2.ChatRequest(
        start=processor_pb2.ChatStart(
            messages=[
                chat_pb2.ChatMessage(
                    role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text=_PROMPT)]
                )
            ],
            options=processor_pb2.GenerationOptions(sampling=sampling(tokens)),
        )
    )
    began = time.perf_counter()
    call = stub.Chat()
    await call.write(request)
    first_s, received, messages, pacing_s = 0.0, 0, 0, 0.0
    while (response := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
        if not messages:
            first_s = time.perf_counter() - began
            await call.done_writing()  # after the first token, as in `direct`
        messages += 1
        received += sum(choice.token_count for choice in response.choices)
        if response.HasField("finished"):
            pacing_s = response.finished.longest_pacing_interval.ToNanoseconds() / 1e9
    assert received == tokens, (received, tokens, await call.code(), await call.details())
    return Answer(first_s, received, messages, pacing_s)
