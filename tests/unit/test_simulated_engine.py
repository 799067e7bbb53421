"""The simulated engine's own details; what every engine must do is tested for all together."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.engines.simulated.transfer import Bootstrap, Offer, fetch, way
from millstream_server.generation.output import CollectingSink, Finish, FinishReason
from millstream_server.generation.request import (
    GenerationRequest,
    LogprobOptions,
    Prompt,
    new_engine_id,
)
from millstream_server.generation.sampling import Ability, Sampling
from millstream_server.generation.ticket import KvTransfer, Ticket
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
)
from millstream_testing.waiting import until

SMALL = SimulatedConfig(vocab_size=100, context_length=64, block_size=4, total_blocks=16)


@contextlib.asynccontextmanager
async def running(config: SimulatedConfig) -> AsyncIterator[SimulatedEngine]:
    engine = SimulatedEngine(config)
    await engine.start(lambda _: None)
    try:
        yield engine
    finally:
        await engine.close()


def submit(
    engine: SimulatedEngine,
    token_ids: list[int],
    max_new_tokens: int = 4,
    *,
    ticket: Ticket | None = None,
    logprobs: LogprobOptions | None = None,
    **sampling: Any,
) -> tuple[str, CollectingSink]:
    engine_id, sink = new_engine_id(), CollectingSink()
    request = GenerationRequest(
        engine_id=engine_id,
        prompt=Prompt(token_ids),
        sampling=Sampling(max_new_tokens=max_new_tokens, **sampling),
        ticket=ticket,
        logprobs=logprobs,
    )
    engine.submit(request, sink)
    return engine_id, sink


async def blocks(engine: SimulatedEngine) -> int:
    return (await engine.load()).used_blocks


# ---- answers


@pytest.mark.parametrize(
    ("prompt", "max_new_tokens", "sampling", "answer", "finish"),
    [
        ([7, 41], 3, {}, [42, 43, 44], (FinishReason.LENGTH, None)),
        ([98], 3, {}, [99, 0, 1], (FinishReason.LENGTH, None)),
        ([0], 9, {"stop_token_ids": (5, 3)}, [1, 2, 3], (FinishReason.STOP, 3)),
        ([8], 9, {}, [9, 10], (FinishReason.STOP, 10)),
        ([8], 4, {"ignore_eos": True}, [9, 10, 11, 12], (FinishReason.LENGTH, None)),
        (
            [8],
            9,
            {"ignore_eos": True, "stop_token_ids": (11,)},
            [9, 10, 11],
            (FinishReason.STOP, 11),
        ),
        ([8], 4, {"min_new_tokens": 3}, [9, 10, 11, 12], (FinishReason.LENGTH, None)),
        ([8], 4, {"min_new_tokens": 2}, [9, 10], (FinishReason.STOP, 10)),
        ([8], 2, {}, [9, 10], (FinishReason.STOP, 10)),
    ],
)
async def test_answers_by_hand(
    prompt: list[int],
    max_new_tokens: int,
    sampling: dict[str, Any],
    answer: list[int],
    finish: tuple[FinishReason, int | None],
) -> None:
    async with running(replace(SMALL, eos_token_id=10)) as engine:
        _, sink = submit(engine, prompt, max_new_tokens, **sampling)
        reason, matched = finish
        assert await sink.result() == Finish(
            reason=reason,
            prompt_tokens=len(prompt),
            completion_tokens=len(answer),
            matched_token_id=matched,
        )
        assert sink.token_ids == answer


async def test_an_answer_goes_on_elsewhere_where_it_was_left() -> None:
    async with running(SMALL) as engine:
        _, whole = submit(engine, [20], 6)
        await whole.result()
        _, rest = submit(engine, [20, *whole.token_ids[:2]], 4)
        await rest.result()
        assert whole.token_ids[2:] == rest.token_ids


async def test_it_says_what_it_is() -> None:
    engine = SimulatedEngine(replace(SMALL, load_s=0.01))
    info = await engine.start(lambda _: None)
    assert info.engine == "simulated"
    assert (info.vocab_size, info.context_length) == (100, 64)
    assert (info.block_size, info.total_blocks) == (4, 16)
    assert info.abilities == frozenset(Ability) - {Ability.CONSTRAINTS, Ability.STRUCTURAL_TAGS}
    assert (info.bootstrap_host, info.bootstrap_port) == ("", 0)
    await engine.warm_up()
    await engine.close()


async def test_a_step_takes_its_time_whatever_the_batch() -> None:
    async with running(replace(SMALL, step_s=0.02, total_blocks=1000)) as engine:
        began = time.monotonic()
        sinks = [submit(engine, [1], 11)[1] for _ in range(20)]
        for sink in sinks:
            await sink.result()
        assert 0.19 < time.monotonic() - began < 1.0


async def test_prefill_takes_its_time_by_length() -> None:
    async with running(replace(SMALL, prefill_s_per_token=0.01)) as engine:
        began = time.monotonic()
        _, sink = submit(engine, [1] * 20, 1)
        await sink.result()
        assert time.monotonic() - began > 0.19


# ---- KV blocks and the queue


async def test_blocks_for_the_whole_possible_length_are_held_and_freed() -> None:
    async with running(replace(SMALL, step_s=60)) as engine:
        a, _ = submit(engine, [1] * 5, 3)  # 8 tokens: 2 blocks of 4
        b, _ = submit(engine, [1] * 5, 4)  # 9 tokens: 3 blocks
        assert await blocks(engine) == 5
        engine.abort(a)
        assert await blocks(engine) == 3
        engine.abort(b)
        assert await blocks(engine) == 0


async def test_what_does_not_fit_waits_in_order() -> None:
    async with running(replace(SMALL, step_s=60)) as engine:
        a, _ = submit(engine, [1], 39)  # 10 blocks
        b, _ = submit(engine, [1], 39)  # 10 more: too many
        c, _ = submit(engine, [1], 3)  # would fit, but came later
        load = await engine.load()
        assert (load.running_requests, load.queued_requests, load.used_blocks) == (1, 2, 10)
        engine.abort(a)
        load = await engine.load()
        assert (load.running_requests, load.queued_requests, load.used_blocks) == (2, 0, 11)
        engine.abort(b)
        engine.abort(c)
        assert await blocks(engine) == 0


async def test_an_aborted_request_in_the_queue_makes_way() -> None:
    async with running(replace(SMALL, step_s=60)) as engine:
        submit(engine, [1], 39)
        b, waiting = submit(engine, [1], 39)
        submit(engine, [1], 3)
        engine.abort(b)
        assert (await waiting.result()).reason is FinishReason.CANCELLED
        load = await engine.load()
        assert (load.running_requests, load.queued_requests, load.used_blocks) == (2, 0, 11)


async def test_no_more_run_than_allowed() -> None:
    async with running(replace(SMALL, max_running_requests=2, step_s=0.001)) as engine:
        sinks = [submit(engine, [i], 2)[1] for i in range(9)]
        load = await engine.load()
        assert (load.running_requests, load.queued_requests) == (2, 7)
        for sink in sinks:
            assert (await sink.result()).reason is FinishReason.LENGTH
        assert await blocks(engine) == 0


async def test_a_request_larger_than_the_cache_is_refused_at_once() -> None:
    async with running(replace(SMALL, step_s=60)) as engine:
        _, first = submit(engine, [1], 39)
        _, waiting = submit(engine, [1], 39)
        _, large = submit(engine, [1] * 40, 25)  # 17 blocks of 16
        with pytest.raises(InvalidRequestError) as caught:
            await large.result()
        assert "17 KV blocks" in caught.value.message
        assert (await engine.load()).queued_requests == 1
        assert first.token_ids == waiting.token_ids == []


async def test_closing_fails_the_running_and_the_waiting_alike() -> None:
    engine = SimulatedEngine(replace(SMALL, max_running_requests=2, step_s=60))
    await engine.start(lambda _: None)
    sinks = [submit(engine, [1], 4)[1] for _ in range(6)]
    await engine.close()
    for sink in sinks:
        with pytest.raises(EngineFailedError):
            await sink.result()
    load = await engine.load()
    assert (load.running_requests, load.queued_requests, load.used_blocks) == (0, 0, 0)


# ---- the hand-off


async def _pair() -> tuple[Bootstrap, Ticket]:
    bootstrap = Bootstrap()
    port = await bootstrap.listen("127.0.0.1", 0)
    return bootstrap, Ticket("127.0.0.1", port, 77)


@pytest.mark.parametrize("decode_first", [False, True])
async def test_a_rendezvous_in_either_order(decode_first: bool) -> None:  # noqa: FBT001
    bootstrap, handoff = await _pair()
    taken = asyncio.Event()
    if not decode_first:
        bootstrap.offer(77, Offer(Prompt([1, 2])), taken.set)
    fetching = asyncio.ensure_future(fetch(handoff, Prompt([1, 2]), 5))
    if decode_first:
        await until(lambda: 77 in bootstrap._offers)
        assert not fetching.done()
        bootstrap.offer(77, Offer(Prompt([1, 2])), taken.set)
    await fetching
    await asyncio.wait_for(taken.wait(), 5)
    await bootstrap.close()


@pytest.mark.parametrize("other", [[1, 3], [1, 1, 2]])
async def test_another_prompt_is_noticed(other: list[int]) -> None:
    bootstrap, handoff = await _pair()
    bootstrap.offer(77, Offer(Prompt([1, 2])), lambda: None)
    with pytest.raises(KvTransferError, match="different prompts"):
        await fetch(handoff, Prompt(other), 5)
    await bootstrap.close()


async def test_another_room_waits_in_vain() -> None:
    bootstrap, handoff = await _pair()
    bootstrap.offer(78, Offer(Prompt([1, 2])), lambda: None)
    with pytest.raises(KvTransferError, match="in time"):
        await fetch(handoff, Prompt([1, 2]), 0.05)
    await bootstrap.close()


async def test_prefill_that_is_not_there() -> None:
    with pytest.raises(KvTransferError, match="disconnected"):
        await fetch(Ticket("127.0.0.1", 1, 77), Prompt([1]), 5)


@pytest.mark.parametrize("closing", [False, True])
async def test_prefill_that_withdraws(closing: bool) -> None:  # noqa: FBT001
    bootstrap, handoff = await _pair()
    fetching = asyncio.ensure_future(fetch(handoff, Prompt([1]), 5))
    await until(lambda: 77 in bootstrap._offers)
    if closing:
        await bootstrap.close()
    else:
        bootstrap.withdraw(77)
    with pytest.raises(KvTransferError, match="disconnected"):
        await fetching
    await bootstrap.close()


async def test_a_caller_that_hangs_up_leaves_nothing_behind() -> None:
    bootstrap, handoff = await _pair()
    fetching = asyncio.ensure_future(fetch(handoff, Prompt([1]), 5))
    await until(lambda: 77 in bootstrap._offers)
    fetching.cancel()
    await until(lambda: not bootstrap._offers)
    await bootstrap.close()


async def test_nonsense_at_the_bootstrap_port_harms_nobody() -> None:
    bootstrap, handoff = await _pair()
    reader, writer = await asyncio.open_connection("127.0.0.1", handoff.bootstrap_port)
    writer.write(b"GET")
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
    bootstrap.offer(77, Offer(Prompt([1])), lambda: None)
    await fetch(handoff, Prompt([1]), 5)
    await bootstrap.close()


async def test_a_taken_bootstrap_port_fails_the_start() -> None:
    bootstrap, handoff = await _pair()
    engine = SimulatedEngine(
        replace(SMALL, role=Role.PREFILL, bootstrap_port=handoff.bootstrap_port)
    )
    with pytest.raises(EngineFailedError, match="bootstrap port"):
        await engine.start(lambda _: None)
    await engine.close()
    await bootstrap.close()


async def test_prefill_hands_over_and_reports_one_token() -> None:
    prefill = SimulatedEngine(replace(SMALL, role=Role.PREFILL))
    info = await prefill.start(lambda _: None)
    async with running(replace(SMALL, role=Role.DECODE)) as decode:
        handoff = Ticket(info.bootstrap_host, info.bootstrap_port, 5)
        _, first = submit(prefill, [1, 2], 9, ticket=handoff)
        assert await blocks(prefill) == 1
        _, second = submit(decode, [1, 2], 3, ticket=handoff)
        assert await first.result() == Finish(
            reason=FinishReason.LENGTH, prompt_tokens=2, completion_tokens=1
        )
        assert first.token_ids == []
        await second.result()
        assert second.token_ids == [3, 4, 5]
        assert await blocks(prefill) == await blocks(decode) == 0
    await prefill.close()


FIRST = replace(SMALL, role=Role.PREFILL, prefill_first=True)
SECOND = replace(SMALL, role=Role.DECODE, prefill_first=True)


def test_both_ways_of_handing_off_have_kinds_of_their_own() -> None:
    assert way(SMALL) == KvTransfer("simulated")
    assert way(FIRST) == way(SECOND) == KvTransfer("simulated.prefill_first", prefill_first=True)


async def test_with_prefill_first_its_end_has_what_decode_needs() -> None:
    async with running(FIRST) as prefill, running(SECOND) as decode:
        room = Ticket("127.0.0.1", 1, 5)  # nobody connects
        _, first = submit(prefill, [1, 2], 9, ticket=room)
        ended = await first.result()
        assert (ended.reason, ended.completion_tokens) == (FinishReason.LENGTH, 1)
        assert ended.engine_data is not None
        assert ended.engine_data.kind == way(FIRST).kind
        assert first.token_ids == []
        _, second = submit(decode, [1, 2], 3, ticket=replace(room, engine_data=ended.engine_data))
        assert (await second.result()).engine_data is None
        assert second.token_ids == [3, 4, 5]
        for data, prompt in ((ended.engine_data, [1, 3]), (None, [1, 2])):
            _, failed = submit(decode, prompt, 3, ticket=replace(room, engine_data=data))
            with pytest.raises(KvTransferError):
                await failed.result()
        assert await blocks(prefill) == await blocks(decode) == 0
