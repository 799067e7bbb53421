"""Cancelling on real SGLang, at every stage, in every spelling: the engines are idle in a second.

The prefill worker computes 16 tokens a step, so that a prompt of 1,900 takes long enough to be
caught in. "During transfer" is made certain by one leg that waits for the other.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import (
    decode_pb2_grpc,
    generation_pb2,
    prefill_pb2_grpc,
    processor_pb2_grpc,
)
from tests.e2e.conftest import Suite
from tests.support.processor.chats import (
    CANCEL,
    Conversation,
    completion,
    gather,
    message,
    options,
    start,
)
from tests.support.wire.long_streams import LoadWatch, load_of
from tests.support.worker.worker_streams import Stream, decode_stream, prefill_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_IDLE_S = 1.0
_SHORT = [16 + (5 * i) % 1000 for i in range(40)]
_MANY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
_FEW: dict[str, Any] = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
CANCELLED = generation_pb2.FINISH_REASON_CANCELLED

SPELLINGS = ["message", "rpc", "deadline"]


@contextlib.asynccontextmanager
async def loads(suite: Suite) -> AsyncIterator[tuple[LoadWatch, LoadWatch]]:
    async with load_of(suite.prefill.address) as prefill, load_of(suite.decode.address) as decode:
        yield prefill, decode


@contextlib.asynccontextmanager
async def legs(suite: Suite) -> AsyncIterator[tuple[Stream, Stream]]:
    async with (
        grpc.aio.insecure_channel(suite.prefill.address) as prefill,
        grpc.aio.insecure_channel(suite.decode.address) as decode,
    ):
        yield (
            prefill_stream(prefill_pb2_grpc.PrefillServiceStub(prefill)),
            decode_stream(decode_pb2_grpc.DecodeServiceStub(decode)),
        )


async def end(stream: Stream, spelling: str) -> None:
    """Cancel slot 1 in one of three spellings and check how it ended."""
    if spelling == "message":
        await stream.cancel(1)
        (view,) = await stream.ended(1)
        assert view.finish is not None
        assert view.finish.reason == CANCELLED
    elif spelling == "rpc":
        stream.call.cancel()
    else:
        (view,) = await stream.ended(1)
        assert view.reason == "DEADLINE_EXCEEDED"


def timeout(spelling: str, seconds: float) -> float | None:
    return seconds if spelling == "deadline" else None


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_decode_waiting_for_its_cache(suite: Suite, spelling: str) -> None:
    """The decode leg alone: its prefill never comes."""
    async with loads(suite) as (_, load), legs(suite) as (_, decode):
        await load.idle(within_s=30)
        seconds = timeout(spelling, 1.0)
        await decode.start(1, _SHORT, ticket=suite.mint(), timeout_s=seconds, **_FEW)
        await load.busy(within_s=5)
        await end(decode, spelling)
        await load.idle(within_s=_IDLE_S)


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_prefill_waiting_for_its_decode(suite: Suite, spelling: str) -> None:
    """The prefill leg alone: nobody fetches its cache."""
    async with loads(suite) as (load, _), legs(suite) as (prefill, _):
        await load.idle(within_s=30)
        seconds = timeout(spelling, 1.0)
        await prefill.start(1, _SHORT, ticket=suite.mint(), timeout_s=seconds, **_FEW)
        await load.busy(within_s=5)
        await end(prefill, spelling)
        await load.idle(within_s=_IDLE_S)


async def test_decode_gets_no_token_of_a_cancelled_prefill(suite: Suite) -> None:
    """A part of a cache must not be taken for the whole.

    SGLang tells decode nothing: the Processor cancels that leg, as here.
    """
    prompt = [16 + (3 * i) % 1000 for i in range(1900)]
    async with loads(suite) as (first, second), legs(suite) as (prefill, decode):
        await asyncio.gather(first.idle(within_s=30), second.idle(within_s=30))
        ticket = suite.mint()
        for stream in (decode, prefill):
            await stream.start(1, prompt, ticket=ticket, **_FEW)
        await first.busy(within_s=5)
        await prefill.cancel(1)
        (cut,) = await prefill.ended(1)
        assert cut.finish is not None
        assert cut.finish.reason == CANCELLED
        await first.idle(within_s=10)
        await decode.cancel(1)
        (alone,) = await decode.ended(1)
        assert alone.finish is not None
        assert (alone.finish.reason, alone.token_ids) == (CANCELLED, [])
        await asyncio.gather(first.idle(within_s=10), second.idle(within_s=10))


async def test_message_before_anything(suite: Suite) -> None:
    """The cancel is in the same packet as the start."""
    async with loads(suite) as (first, second), legs(suite) as (prefill, decode):
        await first.idle(within_s=30)
        ticket = suite.mint()
        for stream in (prefill, decode):
            await stream.start(1, _SHORT, ticket=ticket, **_FEW)
            await stream.cancel(1)
        for stream in (prefill, decode):
            (view,) = await stream.ended(1)
            assert view.finish is not None
            assert view.finish.reason == CANCELLED
            assert view.token_ids == []
        await asyncio.gather(first.idle(_IDLE_S), second.idle(_IDLE_S))


_STEPS_AHEAD = 2


class Front:
    """A chat through the Processor, cancelled in one of three spellings."""

    def __init__(self, stub: Any, spelling: str, deadline_s: float) -> None:
        self.spelling = spelling
        self.answering = False
        self.chat = Conversation(stub, timeout=timeout(spelling, deadline_s))

    async def begin(self, text: str, opts: Any) -> None:
        await self.chat.say(start(opts=opts, messages=[message(text)]))

    async def end(self) -> None:
        if self.spelling == "message":
            await self.chat.say(CANCEL)
            answer = await self.chat.answer()
            assert answer.finish_reason == CANCELLED
            assert answer.usage.completion_tokens == answer.choices[0].token_count
            if self.answering:
                assert answer.usage.completion_tokens
            else:  # the cancel is on its way while the engine works: it may be a step ahead
                assert answer.usage.completion_tokens <= _STEPS_AHEAD
        elif self.spelling == "rpc":
            self.chat.call.cancel()
        else:
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await self.chat.answer()
            assert bool(self.chat.answers) == self.answering


@contextlib.asynccontextmanager
async def front(suite: Suite, spelling: str, deadline_s: float) -> AsyncIterator[Front]:
    async with grpc.aio.insecure_channel(suite.front_disaggregated.address) as channel:
        await channel.channel_ready()  # the deadline is spent on the request alone
        yield Front(processor_pb2_grpc.ProcessorServiceStub(channel), spelling, deadline_s)


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_chat_before_the_first_token(suite: Suite, spelling: str) -> None:
    async with loads(suite) as watched, front(suite, spelling, deadline_s=0.01) as chat:
        await watched[0].idle(within_s=30)
        await chat.begin("Hello", options(**_FEW))
        await chat.end()
        await asyncio.gather(*(load.idle(_IDLE_S) for load in watched))


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_chat_during_prefill(suite: Suite, spelling: str) -> None:
    async with loads(suite) as watched, front(suite, spelling, deadline_s=0.3) as chat:
        await watched[0].idle(within_s=30)
        await chat.begin("def forward(self, value): " * 120, options(**_FEW))
        await watched[0].busy(within_s=5)
        await chat.end()
        await asyncio.gather(*(load.idle(_IDLE_S) for load in watched))


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_chat_during_decode(suite: Suite, spelling: str) -> None:
    async with loads(suite) as watched, front(suite, spelling, deadline_s=2.0) as chat:
        await watched[1].idle(within_s=30)
        await chat.begin("Hello", options(**_MANY))
        for _ in range(5):
            await chat.chat.read()
        chat.answering = True
        await chat.end()
        await asyncio.gather(*(load.idle(_IDLE_S) for load in watched))


async def test_others_go_on(suite: Suite) -> None:
    """A neighbour's cancels change nothing in an answer."""
    async with grpc.aio.insecure_channel(suite.front_disaggregated.address) as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        opts = options(return_token_ids=True, **_FEW)
        alone = await gather(stub.Complete(completion(_SHORT, opts)))
        healthy = asyncio.ensure_future(gather(stub.Complete(completion(_SHORT, opts))))
        for prompt in ("Hello", "def forward(self, value): " * 60, "x"):
            chat = Conversation(stub)
            await chat.say(start(prompt, opts=options(**{**_MANY, "max_new_tokens": 800})))
            await chat.say(CANCEL)
            assert (await chat.answer()).finish_reason == CANCELLED
            await chat.end()
        assert (await healthy).choices[0].token_ids == alone.choices[0].token_ids
