"""A normal client: every half second a chat on its connection and one on a new connection.

It waits for none of them. 256 chats at once come first. Every second of the later ones has a
prompt that is long enough for the text threads; the others are rendered on the event loop.

python -m tests.benchmarks.hostile.normal '{"address": "127.0.0.1:50051"}'

It prints a line of JSON for each chat and ends when its stdin is closed, after its last chat. As
the module is used elsewhere, `NormalClient` is the other end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc
import uvloop

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc, sampling_pb2

_EVERY_S = 0.5
_DEADLINE_S = 20.0
_TOKENS = 8
_FIRST_CHATS = 256
"""At once, before all others."""
_SHORT = "What is Millstream?"
_LONG = "What is Millstream? " * 75


@dataclass(frozen=True, kw_only=True)
class NormalOptions:
    """Whom it calls, and how it shows who it is."""

    address: str
    key: str | None = None
    ca: str | None = None
    cert: str | None = None
    private_key: str | None = None
    name: str | None = None
    """In the server's certificate."""


@dataclass(frozen=True)
class Chat:
    """One chat; times are of the monotonic clock, which all processes share."""

    began: float
    took_s: float
    code: str
    details: str
    new: bool = False
    """On a connection of its own, made for it."""


@dataclass
class NormalClient:
    """A normal client's process, and the chats that have ended."""

    options: NormalOptions
    chats: list[Chat] = field(default_factory=list)
    _process: subprocess.Popen[str] = field(init=False)
    _reader: threading.Thread = field(init=False)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(asdict(self.options))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def finish(self) -> None:
        """Begin no further chat, and wait for those that are open."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_DEADLINE_S + 10)
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.chats.append(Chat(**json.loads(line)))


# ---- inside the process --------------------------------------------------------------------------


def _channel(options: NormalOptions) -> grpc.aio.Channel:
    arguments: list[tuple[str, Any]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    if not options.ca:
        return grpc.aio.insecure_channel(options.address, options=arguments)
    if options.name:
        arguments.append(("grpc.ssl_target_name_override", options.name))
    files = [Path(p).read_bytes() if p else None for p in (options.private_key, options.cert)]
    credentials = grpc.ssl_channel_credentials(Path(options.ca).read_bytes(), *files)
    return grpc.aio.secure_channel(options.address, credentials, options=arguments)


def _request(prompt: str) -> processor_pb2.ChatRequest:
    content = [chat_pb2.ContentPart(text=prompt)]
    sampling = sampling_pb2.SamplingParams(max_new_tokens=_TOKENS, ignore_eos=True)
    return processor_pb2.ChatRequest(
        start=processor_pb2.ChatStart(
            messages=[chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)],
            options=processor_pb2.GenerationOptions(sampling=sampling),
        )
    )


async def _chat(channel: grpc.aio.Channel, key: str | None, prompt: str) -> tuple[str, str]:
    """Chat once; returns the status."""
    stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    tokens = 0
    try:
        async for response in stub.Chat(
            iter([_request(prompt)]), metadata=metadata, timeout=_DEADLINE_S, wait_for_ready=False
        ):
            tokens += sum(choice.token_count for choice in response.choices)
    except grpc.aio.AioRpcError as error:
        return error.code().name, (error.details() or "")[:120]
    return ("OK", "") if tokens == _TOKENS else ("SHORT", f"{tokens} tokens, not {_TOKENS}")


async def _one(options: NormalOptions, channel: grpc.aio.Channel | None, prompt: str) -> None:
    began = time.monotonic()
    if channel is not None:
        code, details = await _chat(channel, options.key, prompt)
    else:
        async with _channel(options) as fresh:
            code, details = await _chat(fresh, options.key, prompt)
    chat = Chat(began, time.monotonic() - began, code, details, new=channel is None)
    print(json.dumps(asdict(chat)), flush=True)  # noqa: T201


async def _serve(options: NormalOptions) -> None:
    closed = asyncio.ensure_future(asyncio.to_thread(sys.stdin.read))
    # What is idle has served before: else memory that any load takes would count as the attack's.
    async with _channel(options) as first:
        await asyncio.gather(*(_chat(first, options.key, _LONG) for _ in range(_FIRST_CHATS)))
    chats: list[asyncio.Task[None]] = []
    due = time.monotonic()
    async with _channel(options) as channel:
        while not closed.done():
            prompt = _LONG if len(chats) % 4 < 2 else _SHORT
            chats += [asyncio.create_task(_one(options, on, prompt)) for on in (channel, None)]
            due += _EVERY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(closed), max(0.0, due - time.monotonic()))
        await asyncio.gather(*chats)


if __name__ == "__main__":
    uvloop.run(_serve(NormalOptions(**json.loads(sys.argv[1]))))
