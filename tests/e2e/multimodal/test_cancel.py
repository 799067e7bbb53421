"""Cancelling a chat with pictures, at every stage, in every spelling: nothing is left in a second.

Prefill computes 16 tokens a step, so that 1,500 take long enough to be caught in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import generation_pb2
from millstream_testing.waiting import until
from tests.e2e.multimodal.conftest import Suite
from tests.support.media.vision_chats import Question, ask, check, photo
from tests.support.processor.chats import CANCEL, Conversation, options, start
from tests.support.wire.long_streams import LoadWatch, load_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_WITHIN_S = 1.0
_MANY = 1500
_STEPS_AHEAD = {"encode": 0, "prefill": 2}
"""The cancel is on its way while the engine works."""
_SEEDS = itertools.count(5000)
_LATE: dict[str, float] = {"encode": 0.1, "prefill": 0.6, "decode": 3.0}
"""Deadlines that pass in a stage, or soon after on a machine that is faster."""


@contextlib.asynccontextmanager
async def loads(suite: Suite) -> AsyncIterator[tuple[LoadWatch, LoadWatch]]:
    async with load_of(suite.prefill.address) as prefill, load_of(suite.decode.address) as decode:
        await asyncio.gather(prefill.idle(30), decode.idle(30))
        yield prefill, decode


async def leases(suite: Suite) -> float:
    return (await suite.scrape()).value("millstream_encode_leases")


async def nothing_left(suite: Suite, watched: tuple[LoadWatch, LoadWatch]) -> None:
    """Engines idle and leases given back, soon."""

    async def unleased() -> bool:
        return await leases(suite) == 0

    await asyncio.gather(*(load.idle(_WITHIN_S) for load in watched), until(unleased, _WITHIN_S))


def never_seen() -> Question:
    """Ask about pictures that are in no cache, with a long text after them."""
    pictures = [photo(256, 256, seed=next(_SEEDS)) for _ in range(6)]
    return Question.of(*pictures, "def forward(self, value): " * 80)


@pytest.mark.parametrize("stage", ["encode", "prefill", "decode"])
@pytest.mark.parametrize("spelling", ["message", "rpc", "deadline"])
async def test_cancel(suite: Suite, stub: Any, spelling: str, stage: str) -> None:
    opts = options(_MANY, ignore_eos=True, temperature=0)
    question = Question.of("Hi ", photo(seed=1)) if stage == "decode" else never_seen()
    message = start(messages=[question.message], opts=opts)
    async with loads(suite) as watched:
        chat = Conversation(stub, timeout=_LATE[stage] if spelling == "deadline" else None)
        await chat.say(message)
        if stage == "prefill" and spelling != "deadline":
            await watched[0].busy(within_s=10)
        elif stage == "decode":
            while not chat.answers or not chat.answers[0].choices:
                assert await chat.read()
        await ended(chat, spelling, stage)
        await nothing_left(suite, watched)
    after = Question.of("What is this? ", photo(96, 64, seed=10), " Answer.")
    check(await ask(stub, after), after.case(suite.model))


async def ended(chat: Conversation, spelling: str, stage: str) -> None:
    """End the turn and check how it ended."""
    if spelling == "rpc":
        chat.call.cancel()
    elif spelling == "deadline":
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await chat.answer()
        if stage == "encode":
            assert not chat.answers or not chat.answers[0].choices
    else:
        await chat.say(CANCEL)
        answer = await chat.answer()
        assert answer.finish_reason == generation_pb2.FINISH_REASON_CANCELLED
        tokens = answer.usage.completion_tokens
        assert 0 < tokens < _MANY if stage == "decode" else tokens <= _STEPS_AHEAD[stage]
        await chat.end()
