"""A process that only loads a server with chats: plain gRPC on uvloop, no client library of ours.

    python -m tests.support.benchmarks.chat_load 127.0.0.1:50051

It reads one JSON command a line from stdin and prints one JSON object for each. `ChatLoad` is the
other end of these pipes. Every chat is one call of `Channel.unary_stream` on the bidi method, which
on the wire is one message and a half-close, and takes grpc.aio the fewest operations.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
import uvloop

from millstream.v1 import (
    chat_pb2,
    decode_pb2,
    generation_pb2,
    processor_pb2,
    sampling_pb2,
)

_CHAT = "/millstream.v1.ProcessorService/Chat"
_DECODE = "/millstream.v1.DecodeService/Decode"
_CHANNELS = 4
_PROMPT = "What is Millstream?"
_PROMPT_IDS = range(5, 25)
_FIRST_TOKENS_S = 60.0

Call = Callable[[], Any]


@dataclass(frozen=True)
class Loaded:
    """What a load took: the client's own CPU, and each chat's time to its first message."""

    chats: int
    took_s: float
    client_s: float
    ttft_s: Sequence[float]
    direct_ttft_s: Sequence[float] = ()


@dataclass
class ChatLoad:
    """A load process and the commands it takes; one at a time. The address may be any server's."""

    address: str
    process: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.benchmarks.chat_load", self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def closed_loop(
        self, streams: int, tokens: int, seconds: float, *, pause_s: float = 0.0
    ) -> Loaded:
        """Keep so many chats open for ``seconds``: each that ends is followed by the next."""
        return self._do("closed_loop", streams, tokens, seconds, pause_s)

    def bursts(self, streams: int, tokens: int, times: int) -> Loaded:
        """Start so many chats at once and await all, so many times."""
        return self._do("bursts", streams, tokens, times)

    def hold(self, streams: int, tokens: int) -> Loaded:
        """Keep chats going in the background; returns when each stream has its first token."""
        return self._do("hold", streams, tokens)

    def held(self) -> int:
        """Count the streams of `hold` that have not failed."""
        return self._do("held").chats

    def alternate(self, worker: str, times: int) -> Loaded:
        """Make chats of one token, each followed by the same at ``worker``, without a Processor."""
        return self._do("alternate", worker, times)

    def echoes(self, streams: int, seconds: float) -> Loaded:
        """Do as `closed_loop` does with a server that sends back what it gets."""
        return self._do("echoes", streams, seconds)

    def _do(self, command: str, *arguments: object) -> Loaded:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the load process ended in {command} with {self.process.wait()}"
        return Loaded(**json.loads(line))


# ---- inside the process --------------------------------------------------------------------------


class _Commands:
    def __init__(self, address: str) -> None:
        self._channels = [_channel(address) for _ in range(_CHANNELS)]
        self._background: list[asyncio.Future[Any]] = []

    async def closed_loop(
        self, streams: int, tokens: int, seconds: float, pause_s: float
    ) -> dict[str, Any]:
        request = _chat_request(tokens)
        return await _looped(
            [lambda start=start: _chat(start(request), tokens) for start in self._starts(streams)],  # type: ignore[misc]
            seconds,
            pause_s,
        )

    async def bursts(self, streams: int, tokens: int, times: int) -> dict[str, Any]:
        request = _chat_request(tokens)
        began, cpu, ttft_s = time.perf_counter(), time.process_time(), []
        for _ in range(times):
            ttft_s += await asyncio.gather(
                *(_chat(start(request), tokens) for start in self._starts(streams))
            )
        return _loaded(began, cpu, ttft_s)

    async def hold(self, streams: int, tokens: int) -> dict[str, Any]:
        request = _chat_request(tokens)
        began, cpu = time.perf_counter(), time.process_time()
        firsts = [asyncio.Event() for _ in range(streams)]
        self._background = [
            asyncio.ensure_future(_endless(start, request, first))
            for start, first in zip(self._starts(streams), firsts, strict=True)
        ]
        async with asyncio.timeout(_FIRST_TOKENS_S):
            await asyncio.gather(*(first.wait() for first in firsts))
        return _loaded(began, cpu, [])

    async def held(self) -> dict[str, Any]:
        going = sum(not chat.done() for chat in self._background)
        return {**_loaded(time.perf_counter(), time.process_time(), []), "chats": going}

    async def alternate(self, worker: str, times: int) -> dict[str, Any]:
        request, direct_request = _chat_request(1), _decode_request()
        (start,) = self._starts(1)
        began, cpu, ttft_s, direct_s = time.perf_counter(), time.process_time(), [], []
        async with _channel(worker) as channel:
            decode = _method(channel, _DECODE)
            for _ in range(times):
                ttft_s.append(await _chat(start(request), 1))
                direct_s.append(await _echo(decode(direct_request)))
        return {**_loaded(began, cpu, ttft_s), "direct_ttft_s": direct_s}

    async def echoes(self, streams: int, seconds: float) -> dict[str, Any]:
        request = _chat_request(2)
        return await _looped(
            [lambda start=start: _echo(start(request)) for start in self._starts(streams)],  # type: ignore[misc]
            seconds,
            0.0,
        )

    def _starts(self, streams: int) -> list[Any]:
        methods = [_method(channel, _CHAT) for channel in self._channels]
        return list(itertools.islice(itertools.cycle(methods), streams))


async def _looped(calls: Sequence[Call], seconds: float, pause_s: float) -> dict[str, Any]:
    began, cpu = time.perf_counter(), time.process_time()
    ttft_s: list[float] = []

    async def forever(call: Call) -> None:
        while time.perf_counter() - began < seconds:
            ttft_s.append(await call())
            if pause_s:
                await asyncio.sleep(pause_s)

    await asyncio.gather(*map(forever, calls))
    return _loaded(began, cpu, ttft_s)


def _loaded(began: float, cpu: float, ttft_s: Sequence[float]) -> dict[str, Any]:
    return {
        "chats": len(ttft_s),
        "took_s": time.perf_counter() - began,
        "client_s": time.process_time() - cpu,
        "ttft_s": ttft_s,
    }


async def _chat(call: Any, tokens: int) -> float:
    """Read a chat to its end; returns the time to its first token."""
    began, first_s, received, finished = time.perf_counter(), 0.0, 0, False
    async for message in call:
        response = processor_pb2.ChatResponse.FromString(message)
        for choice in response.choices:
            received += choice.token_count
        if received and not first_s:
            first_s = time.perf_counter() - began
        finished = response.HasField("finished")
    assert finished, "the answer has no end"
    assert received == tokens, f"{received} tokens, not {tokens}"
    return first_s


async def _endless(start: Any, request: Any, first: asyncio.Event) -> None:
    """Read long answers without looking at them, one after the other."""
    while True:
        async for _ in start(request):
            first.set()


async def _echo(call: Any) -> float:
    """Read a stream to its end; returns the time to its first message."""
    began, first_s = time.perf_counter(), 0.0
    async for _ in call:
        first_s = first_s or time.perf_counter() - began
    assert first_s, "no message came"
    return first_s


def _channel(address: str) -> grpc.aio.Channel:
    """Open a channel with a connection of its own, and without retries that would hide failures."""
    return grpc.aio.insecure_channel(
        address, options=[("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    )


def _method(channel: grpc.aio.Channel, name: str) -> Any:
    return channel.unary_stream(name, request_serializer=None, response_deserializer=None)


def _chat_request(tokens: int) -> bytes:
    content = [chat_pb2.ContentPart(text=_PROMPT)]
    return processor_pb2.ChatRequest(
        start=processor_pb2.ChatStart(
            messages=[chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)],
            options=processor_pb2.GenerationOptions(sampling=_sampling(tokens)),
        )
    ).SerializeToString()


def _decode_request() -> bytes:
    start = generation_pb2.StartGeneration(slot=0, token_ids=_PROMPT_IDS, sampling=_sampling(1))
    return decode_pb2.DecodeRequest(start=start).SerializeToString()


def _sampling(tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(max_new_tokens=tokens, ignore_eos=True)


async def _serve(address: str) -> None:
    commands = _Commands(address)
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, *arguments = json.loads(line)
        print(json.dumps(await getattr(commands, name)(*arguments)), flush=True)  # noqa: T201


if __name__ == "__main__":
    uvloop.run(_serve(sys.argv[1]))
