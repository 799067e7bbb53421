"""Prefill and decode in two engines, the KV cache over NIXL; both ways of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
import pytest_asyncio

from millstream_server.engines.vllm import handoff, launch
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import new_engine_id
from millstream_server.generation.ticket import EngineData
from millstream_server.runtime.errors import InvalidRequestError, KvTransferError
from tests.support.engines.vllm_engines import (
    KEY,
    LONG,
    PROMPTS,
    Pair,
    Started,
    generation,
    result,
    started_pair,
)

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]

_TIMEOUT_S = 6.0
_LEASE_S = {"push": 120, "pull": 6}
"""Push: longer than any test waits for blocks to be free. Its own lease: `test_ranks.py`."""


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["push", "pull"])
async def pair(request: pytest.FixtureRequest, model: Path) -> AsyncIterator[Pair]:
    limits = {"transfer_timeout_s": _TIMEOUT_S, "handoff_wait_s": _TIMEOUT_S}
    settings = {"max_running_requests": 8, **limits}

    def channel(config: VllmEngineConfig) -> handoff.SideChannel:
        return replace(handoff.side_channel(config), lease_s=_LEASE_S[request.param])

    with mock.patch.object(launch, "side_channel", channel):
        starting = started_pair(model, connector=request.param, **settings)
        async with starting as running:
            yield running


async def _idle(engine: Started) -> None:
    async with asyncio.timeout(30):
        while (load := await engine.engine.load()).used_blocks or load.running_requests:
            await asyncio.sleep(0.05)


async def test_greedy_equals_transformers(pair: Pair, expected: list[list[int]]) -> None:
    for ids, wanted in zip(PROMPTS, expected, strict=True):
        got, first, last = await pair.hand_off(generation(ids, len(wanted)))
        assert got == wanted
        assert first.completion_tokens == 0
        assert (first.prompt_tokens, last.prompt_tokens) == (len(ids), len(ids))


async def test_workers_keep_all_cores(pair: Pair) -> None:
    """vLLM would bind both to one core (`engines/vllm/worker_on_cpu.py`)."""
    for engine in (pair.prefill, pair.decode):
        built, _ = engine.engine._lifetime.ready()
        for pid in built.pids():
            assert len(psutil.Process(pid).cpu_affinity()) == len(os.sched_getaffinity(0))


async def test_all_at_once(pair: Pair, expected: list[list[int]]) -> None:
    """On decode too prompts are in the prefix cache now."""
    done = await asyncio.gather(
        *(
            pair.hand_off(generation([*ids, 30], len(wanted), ignore_eos=True))
            for ids, wanted in zip(PROMPTS, expected, strict=True)
        )
    )
    assert all(last.reason is FinishReason.LENGTH for _, _, last in done)
    await _idle(pair.decode)


async def test_decode_can_begin_long_before_or_after(pair: Pair) -> None:
    for n, decode_first in enumerate((True, False)):
        ids = [*range(300 + n, 370 + n)]
        whole = [await pair.hand_off(generation(ids, 6), decode_first=decode_first, apart_s=1.0)]
        again = await pair.hand_off(generation(ids, 6))
        assert whole[0][0] == again[0]


async def test_an_abort_of_decode_while_it_waits(pair: Pair, expected: list[list[int]]) -> None:
    """Prefill writes nothing into blocks that are free by then, and doesn't keep its own."""
    assert pair.decode.info.kv_transfer is not None
    if pair.decode.info.kv_transfer.prefill_first:
        pytest.skip("decode doesn't wait for prefill: it comes after it")
    request = generation([17] * 300, LONG, ticket=pair.ticket())
    sink = pair.decode.submit(request)
    await asyncio.sleep(0.2)
    assert (await pair.decode.abort(request, sink)).reason is FinishReason.CANCELLED
    await _idle(pair.decode)
    await result(pair.prefill.submit(replace(request, engine_id=new_engine_id())))
    assert (await pair.hand_off(generation(PROMPTS[15])))[0] == expected[15]
    await _idle(pair.prefill)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.01, 0.05])
async def test_an_abort_of_decode_that_comes_late(pair: Pair, after_s: float) -> None:
    """Prefill has ended, and keeps its blocks until decode asks: which it won't any more.

    ``after_s``: decode's core may not have it yet, may have it, or may have asked.
    """
    request = generation([round(1000 * after_s) + 40] * 300, LONG, ticket=pair.ticket())
    prefilled = await result(pair.prefill.submit(request))
    if prefilled.engine_data is not None:
        pytest.skip("decode reads the blocks; those that it doesn't read go with the lease")
    late = replace(request, engine_id=new_engine_id())
    sink = pair.decode.submit(late)
    await asyncio.sleep(after_s)
    await pair.decode.abort(late, sink)
    await asyncio.gather(_idle(pair.prefill), _idle(pair.decode))


async def test_an_abort_of_decode_while_it_runs(pair: Pair) -> None:
    ticket = pair.ticket()
    prefill = replace(generation([18] * 300, ticket=ticket))
    if pair.prefill.info.kv_transfer and pair.prefill.info.kv_transfer.prefill_first:
        first = await result(pair.prefill.submit(prefill))
        ticket = KEY.renew(ticket, first.engine_data)
    else:
        pair.prefill.submit(prefill)
    request = generation([18] * 300, LONG, ticket=ticket, ignore_eos=True)
    sink = pair.decode.submit(request)
    async with asyncio.timeout(60):
        await sink.first_token()
    finish = await pair.decode.abort(request, sink)
    assert finish.reason is FinishReason.CANCELLED
    assert finish.completion_tokens == len(sink.token_ids) > 0
    await _idle(pair.decode)


async def test_a_prefill_that_never_comes(pair: Pair) -> None:
    transfer = pair.prefill.info.kv_transfer
    assert transfer is not None
    if transfer.prefill_first:
        pytest.skip("decode doesn't wait for prefill: it comes after it")
    begun = time.monotonic()
    sink = pair.decode.submit(generation([19] * 90, ticket=pair.ticket()))
    with pytest.raises(KvTransferError):
        await result(sink)
    assert time.monotonic() - begun >= _TIMEOUT_S - 0.5
    await _idle(pair.decode)


async def test_a_prefill_that_is_gone(pair: Pair) -> None:
    """Its host doesn't answer: a failure to retry, and decode lives."""
    ticket = pair.ticket()
    transfer = pair.prefill.info.kv_transfer
    assert transfer is not None
    if transfer.prefill_first:
        first = await result(pair.prefill.submit(generation([21] * 90, ticket=ticket)))
        assert first.engine_data is not None
        data = first.engine_data.data.replace(b'"remote_engine_id": "', b'"remote_engine_id": "x')
    else:
        assert ticket.engine_data is not None
        data = ticket.engine_data.data.replace(b'"engine_id": "', b'"engine_id": "x')
    nobody = replace(ticket, engine_data=EngineData(transfer.kind, data))
    sink = pair.decode.submit(generation([21] * 90, ticket=nobody))
    with pytest.raises(KvTransferError):
        await result(sink)
    await _idle(pair.decode)
    got, _, _ = await pair.hand_off(generation([22] * 40, 4))
    assert got


async def test_data_that_is_not_this_engines(pair: Pair) -> None:
    transfer = pair.prefill.info.kv_transfer
    assert transfer is not None
    for data in (None, EngineData("sglang.nixl", b"{}"), EngineData(transfer.kind, b"[1]")):
        ticket = replace(pair.ticket(), engine_data=data)
        with pytest.raises(InvalidRequestError, match=r"ticket\.engine_data"):
            await result(pair.decode.submit(generation([23] * 9, ticket=ticket)))


async def test_data_of_another_prompt(pair: Pair) -> None:
    """vLLM would compute on with that prompt's KV cache."""
    if pair.prefill.info.kv_transfer and not pair.prefill.info.kv_transfer.prefill_first:
        pytest.skip("the legs meet by the ticket's room")
    ticket = pair.ticket()
    first = await result(pair.prefill.submit(generation([24] * 50, ticket=ticket)))
    second = generation([25] * 50, ticket=KEY.renew(ticket, first.engine_data))
    with pytest.raises(InvalidRequestError, match="another prompt"):
        await result(pair.decode.submit(second))
    assert (await pair.prefill.engine.load()).used_blocks
    await _idle(pair.prefill)  # after the lease
