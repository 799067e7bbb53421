"""The caller's deadline on its way to the workers: each is told how much time is left."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessProcessor,
    processor,
    worker,
)
from millstream_testing.waiting import until
from tests.support.processor.chats import Conversation, completion, gather, options, start
from tests.support.processor.starts import Starts, kept_starts

ALONE = (Role.AGGREGATED,)
PAIR = (Role.PREFILL, Role.DECODE)
TIMEOUT_S = 60.0
SLACK_S = 20.0
"""Of a machine that others share, on the way to the worker."""
CLOCKS_S = 0.1
"""How far the two ends' clocks may differ, and gRPC's rounding."""
WAIT_S = 0.5
ONE_AT_ONCE = replace(ALPHABET, max_running_requests=1, step_s=0.01)


@contextlib.asynccontextmanager
async def served(
    text_model: TextModel, roles: tuple[Role, ...], config: SimulatedConfig = ALPHABET
) -> AsyncIterator[tuple[InProcessProcessor, Starts]]:
    """Serve a Processor over one worker of each role, and what these are asked for."""
    async with contextlib.AsyncExitStack() as stack:
        starts = stack.enter_context(kept_starts())
        workers = [
            await stack.enter_async_context(worker(replace(config, role=role))) for role in roles
        ]
        addresses = [one.address for one in workers]
        front = await stack.enter_async_context(processor({MODEL: text_model}, addresses))
        yield front, starts


async def _run(
    front: InProcessProcessor, method: str, timeout_s: float | None, *, n: int = 2
) -> None:
    """Run one request with so many choices."""
    opts = options(3, n=n)
    if method == "Complete":
        await gather(front.stub.Complete(completion("hi@", opts), timeout=timeout_s))
        return
    conversation = Conversation(front.stub, timeout=timeout_s)
    await conversation.say(start("hi", opts=opts))
    await conversation.end()


@pytest.mark.parametrize("method", ["Chat", "Complete"])
@pytest.mark.parametrize("roles", [ALONE, PAIR])
async def test_every_leg_gets_the_time_that_the_caller_has_left(
    text_model: TextModel, roles: tuple[Role, ...], method: str
) -> None:
    async with served(text_model, roles) as (front, starts):
        await _run(front, method, TIMEOUT_S)
    assert Counter(role for role, _ in starts) == Counter(roles * 2)
    for role, asked in starts:
        assert asked.time_left_s is not None, role
        assert TIMEOUT_S - SLACK_S < asked.time_left_s <= TIMEOUT_S + CLOCKS_S, role


@pytest.mark.parametrize("method", ["Chat", "Complete"])
@pytest.mark.parametrize("roles", [ALONE, PAIR])
async def test_without_a_deadline_no_leg_gets_one(
    text_model: TextModel, roles: tuple[Role, ...], method: str
) -> None:
    async with served(text_model, roles) as (front, starts):
        await _run(front, method, None)
    assert [asked.time_left_s for _, asked in starts] == [None] * 2 * len(roles)


@pytest.mark.parametrize("method", ["Chat", "Complete"])
@pytest.mark.parametrize("roles", [ALONE, PAIR])
async def test_the_time_in_the_queue_is_taken_off(
    text_model: TextModel, roles: tuple[Role, ...], method: str
) -> None:
    async with served(text_model, roles, ONE_AT_ONCE) as (front, starts):
        (queue,) = front.core.front.queues.values()
        first = Conversation(front.stub)
        await first.say(start("hi", opts=options(400)))
        await until(lambda: queue.running == 1)
        waiting = asyncio.ensure_future(_run(front, method, TIMEOUT_S, n=1))
        await until(lambda: queue.queued == 1)
        clock = asyncio.get_running_loop().time
        since = clock()
        await until(lambda: clock() >= since + WAIT_S)
        held = len(starts)
        assert held == len(roles), "it waits"
        first.call.cancel()
        await waiting
    assert len(starts) == held + len(roles)
    for role, asked in starts[held:]:
        assert asked.time_left_s is not None, role
        left_s = TIMEOUT_S - WAIT_S
        assert left_s - SLACK_S < asked.time_left_s <= left_s + CLOCKS_S, role
