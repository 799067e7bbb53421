"""Services on real vLLM, alone and beside SGLang's of the same model: pairs, kills, cancels."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from millstream.v1 import (
    decode_pb2_grpc,
    generation_pb2,
    processor_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from millstream_server.generation.ticket import EngineData, Ticket, TicketKey
from millstream_testing.waiting import until
from tests.support.engines.vllm_fleet import Fleet, started_fleet
from tests.support.processes import forked
from tests.support.processes.suite import TICKET_KEY, ServiceProcess
from tests.support.processor.chats import (
    CANCEL,
    Answer,
    Conversation,
    completion,
    gather,
    options,
    start,
    until_connected,
)
from tests.support.telemetry.scraping import Scrape, scrape
from tests.support.wire.failures import Failure, refusal
from tests.support.wire.long_streams import LoadWatch
from tests.support.worker.worker_streams import decode_stream

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.sglang,
    pytest.mark.skipif(not forked.SUITE_PYTHON.is_file(), reason="SGLang needs `make setup`"),
]

_PROMPTS = [[(13 * n + 7 * i) % 900 + 50 for i in range(96 + n)] for n in range(8)]
_SLOW = [5 * i % 900 + 50 for i in range(1900)]
"""Its prefill takes a while: 16 tokens a step."""
_IN_PREFILL = range(5, 50)
"""Blocks that it has then, of 60: the others' prompts and the engine's probes need less."""
_LOOKS = 30
_SLICE_S = 0.02
"""So long engines run between two looks, some ten steps."""
_FEW = options(8, temperature=0, ignore_eos=True, return_token_ids=True)
_SOME = options(300, temperature=0, ignore_eos=True, return_token_ids=True)
_MANY = options(1800, temperature=0, ignore_eos=True, return_token_ids=True)
_REASONS = {"WORKER_LOST", "ENGINE_FAILED", "KV_TRANSFER_FAILED", "NO_WORKER"}
"""Of requests that need a worker that is killed; the last one: those that come just behind it."""
_FREE_S = 20.0
"""Until all blocks are free, at most: 5 s for a write, and time on a busy machine. Prefill keeps
what decode doesn't ask for longer, for 30 s."""


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with started_fleet(model, tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


async def _answer(stub: Any, ids: list[int]) -> list[int]:
    return (await gather(stub.Complete(completion(ids, _FEW)))).choices[0].token_ids


async def _metrics(service: ServiceProcess) -> Scrape:
    return await scrape(int(str(service.flags["metrics_listen"]).rpartition(":")[2]))


async def _decoded(fleet: Fleet, role: str) -> dict[str, float]:
    """Return how many requests the workers of a role have ended, by engine."""
    found = {}
    for engine in ("vllm", "sglang"):
        text = await _metrics(fleet.workers[f"{engine} {role}"])
        family = text.families.get("millstream_worker_stream_requests")
        samples = family.samples if family else []
        found[engine] = sum(each.value for each in samples if each.name.endswith("_total"))
    return found


# ---- beside SGLang


async def test_pairs_of_two_engines_serve_one_model(fleet: Fleet) -> None:
    async with fleet.front("pairs") as stub, fleet.front("whole") as other:
        await asyncio.gather(until_connected(stub, 4), until_connected(other, 2))
        wanted = [await _answer(other, ids) for ids in _PROMPTS]
        for _ in range(3):  # a leg at the other engine's would fail
            got = await asyncio.gather(*(_answer(stub, ids) for ids in _PROMPTS))
            assert got == wanted
    first, second = await _decoded(fleet, "prefill"), await _decoded(fleet, "decode")
    assert all(count >= 4 for count in (*first.values(), *second.values())), (first, second)
    text = await _metrics(fleet.fronts["pairs"])
    assert text.value("millstream_kv_handoffs_total", model="tiny", outcome="ok") == 24


async def test_a_prompt_goes_where_it_is_cached(fleet: Fleet) -> None:
    """Blocks of 32 tokens here and of one there, in one prefix index."""
    async with fleet.front("whole") as stub:
        prompts = [[900 - n, *ids] for n, ids in enumerate(_PROMPTS)]
        await asyncio.gather(*(_answer(stub, ids) for ids in prompts))
        await asyncio.sleep(3)  # their events
        for ids in prompts:
            answer = await gather(stub.Complete(completion(ids, _FEW)))
            assert answer.usage.cached_tokens >= 96
    ended = await _decoded(fleet, "whole")
    assert all(ended.values()), ended
    text = await _metrics(fleet.fronts["whole"])
    assert text.value("millstream_routing_cached_tokens_total", model="tiny") >= 8 * 96
    for engine in ("vllm", "sglang"):
        text = await _metrics(fleet.workers[f"{engine} whole"])
        assert text.value("millstream_engine_info", engine=engine, device="cpu") == 1
        _check_own_metrics(text, engine, ended[engine])


def _check_own_metrics(text: Scrape, engine: str, ended: float) -> None:
    """Only the engine's own, under its names; each answer has 8 tokens."""
    own = {name for name in text.families if name.startswith(("vllm:", "sglang:"))}
    assert own
    assert all(name.startswith(f"{engine}:") for name in own)
    if engine == "vllm":
        tiny = {"model_name": "tiny", "engine": "0"}
        # Warm-up and canaries are requests of one or two tokens, too.
        own_requests = (
            text.value("vllm:request_success_total", finished_reason="length", **tiny) - ended
        )
        assert 1 <= own_requests <= 10
        own_tokens = text.value("vllm:generation_tokens_total", **tiny) - 8 * ended
        assert own_requests <= own_tokens <= 2 * own_requests
        first_tokens = text.value("vllm:time_to_first_token_seconds_count", **tiny)
        assert first_tokens == ended + own_requests
        assert 0 < text.value("vllm:time_to_first_token_seconds_sum", **tiny) < 60
        between = text.value("vllm:inter_token_latency_seconds_count", **tiny)
        assert between == 7 * ended + own_tokens - own_requests
        assert text.value("vllm:prefix_cache_hits_total", **tiny) >= 96
        assert text.value("vllm:num_requests_running", **tiny) == 0


# ---- cancels


@pytest.mark.parametrize("spelling", ["message", "rpc", "deadline"])
@pytest.mark.parametrize("phase", ["at once", "prefill", "decode"])
async def test_a_cancel(fleet: Fleet, phase: str, spelling: str) -> None:
    async with fleet.loads() as (first, second), fleet.front("vllm") as stub:
        limits = {"at once": 0.01, "prefill": 0.3, "decode": 2.0}
        deadline = {"timeout": limits[phase]} if spelling == "deadline" else {}
        chat = Conversation(stub, **deadline)
        text = "Hello" if phase != "prefill" else "def forward(self, value): " * 160
        await chat.say(start(text, opts=_MANY if phase == "decode" else _SOME))
        if spelling == "deadline":
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await chat.answer()
        elif phase == "prefill":
            await first.busy(within_s=5)
            async with fleet.frozen("vllm prefill"):
                await _cancel(chat, spelling)
        else:
            for _ in range(4 if phase == "decode" else 0):  # by then it decodes by itself
                await chat.read()
            await _cancel(chat, spelling)
        await first.idle(_FREE_S)
        await second.idle(_FREE_S)


async def _cancel(chat: Conversation, spelling: str) -> None:
    if spelling == "rpc":
        chat.call.cancel()
    else:
        await chat.say(CANCEL)
        assert (await chat.answer()).finish_reason == generation_pb2.FINISH_REASON_CANCELLED


async def test_a_cancel_of_a_leg_whose_cache_does_not_come(fleet: Fleet) -> None:
    worker = fleet.workers["vllm decode"]
    async with fleet.loads() as (_, load), grpc.aio.insecure_channel(worker.address) as channel:
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        await stream.start(1, _PROMPTS[0], ticket=await _ticket(fleet), max_new_tokens=5)
        await load.until(lambda report: report.used_blocks > 0, 5)
        await stream.cancel(1)
        (view,) = await stream.ended(1)
        assert view.finish is not None
        assert view.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
        await load.idle(_FREE_S)


async def _ticket(fleet: Fleet) -> Ticket:
    """Mint one for vLLM's pair, as a Processor does."""
    about = await _info(fleet.workers["vllm prefill"])
    data = EngineData(about.kv_transfer.kind, about.kv_transfer.data)
    return TicketKey.from_hex(TICKET_KEY).mint(about.bootstrap_host, 0, None, data)


async def _info(worker: ServiceProcess) -> Any:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        return (await stub.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info


async def test_prefill_meets_a_decode_engine_that_is_slow_to_answer(fleet: Fleet) -> None:
    """vLLM asks it once, for 5 s: on a busy machine a first wave of hand-offs failed so."""
    async with fleet.restarted("vllm decode"):
        pass  # prefill hasn't met this one
    async with fleet.loads() as (_, decode), fleet.front("vllm") as stub:
        call = asyncio.ensure_future(gather(stub.Complete(completion(_SLOW, _FEW))))
        await decode.until(lambda report: report.used_blocks > 0, 30)
        core = psutil.Process(_core(fleet.workers["vllm decode"]))
        core.suspend()  # the thread that answers is there; the registration is sent elsewhere
        try:
            await asyncio.sleep(7)
        finally:
            core.resume()
        answer = await call
    assert answer.usage.completion_tokens == 8
    assert answer.finished
    assert not answer.finished.redispatches
    async with fleet.front("whole") as other:
        assert await _answer(other, _SLOW) == answer.choices[0].token_ids


# ---- kills


def _core(worker: ServiceProcess) -> int:
    """Return vLLM's core: of the worker's own children the one with the model."""
    children = psutil.Process(worker.pid).children()
    return int(max(children, key=lambda each: each.memory_info().rss).pid)


@pytest.mark.parametrize("process", ["main", "core"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_kill(fleet: Fleet, role: str, process: str) -> None:
    """Requests in all phases at once: those that need the process end, once and to be retried."""
    worker = fleet.workers[f"vllm {role}"]
    async with fleet.loads() as loads, fleet.front("vllm") as stub:
        before = await _answer(stub, _PROMPTS[0])
        async with fleet.restarted(f"vllm {role}"):
            everything = psutil.Process(worker.pid).children(recursive=True)
            pid = worker.pid if process == "main" else _core(worker)
            decoding, prefilling, answer = await _killed_in_all_phases(fleet, stub, loads, pid)
            _check(await asyncio.wait_for(refusal(prefilling), 30))
            if role == "decode":
                _check(await asyncio.wait_for(refusal(decoding), 30))
            else:  # its cache has come
                await _rest(decoding, answer)
                assert answer.usage.completion_tokens == 1800
            survivor = loads[1] if role == "prefill" else loads[0]
            await survivor.idle(_FREE_S)
            await worker.until_gone()
            await until(lambda: not any(each.is_running() for each in everything), 20)
        assert await _answer(stub, _PROMPTS[0]) == before


async def _killed_in_all_phases(
    fleet: Fleet, stub: Any, loads: tuple[LoadWatch, LoadWatch], pid: int
) -> tuple[Any, Any, Answer]:
    """Kill a process while one request decodes and one prefills.

    Returns their calls, and what has come of the first.
    """
    prefill, decode = loads
    for _ in range(9):
        decoding, answer = stub.Complete(completion(_PROMPTS[1], _MANY)), Answer()
        while not answer.choices:
            answer.add(await decoding.read())
        prefilling = stub.Complete(completion(_SLOW, _FEW))
        for _ in range(_LOOKS):
            async with fleet.frozen("vllm prefill", "vllm decode"):
                there, here = await _report(decode), await _report(prefill)
                # Both are at decode, one waits there.
                ready = there.running_requests and there.queued_requests
                if ready and here.used_blocks in _IN_PREFILL:
                    os.kill(pid, signal.SIGKILL)
                    return decoding, prefilling, answer
            await asyncio.sleep(_SLICE_S)
        await _rest(decoding, answer)  # one had ended: again
        await gather(prefilling)
    raise AssertionError("no request decodes any more when another one prefills")


async def _report(load: LoadWatch) -> worker_pb2.LoadReport:
    """Return what a worker says whose engine is frozen."""
    for _ in range(2):  # the first report may be of before
        seen = load.last
        await load.until(lambda report, seen=seen: report is not seen, 10)  # type: ignore[misc]
    assert load.last is not None
    return load.last


async def _rest(call: Any, answer: Answer) -> None:
    while answer.finished is None:
        answer.add(await call.read())


async def test_what_a_killed_decode_worker_ran_goes_on_at_a_whole_one(fleet: Fleet) -> None:
    fields: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked = [
        completion(_PROMPTS[0], options(1200, **fields)),
        completion(_PROMPTS[1], options(1200, presence_penalty=0.5, **fields)),
        completion(_PROMPTS[2], options(1200, **fields | {"temperature": 0.5, "seed": 7})),
    ]
    async with (
        fleet.loads() as (_, decode),
        fleet.front("all of vllm") as stub,
        fleet.restarted("vllm decode"),
    ):
        before = [await gather(stub.Complete(one)) for one in asked]
        answers = await _killed_while_it_decodes(fleet, stub, decode, asked)
    replay = processor_pb2.REDISPATCH_WAY_REPLAY
    ways = [processor_pb2.REDISPATCH_WAY_CONTINUE, replay, replay]
    for answer, undisturbed, way in zip(answers, before, ways, strict=True):
        assert answer.choices[0].token_ids == undisturbed.choices[0].token_ids
        assert answer.finished
        assert [each.way for each in answer.finished.redispatches] == [way]


async def _killed_while_it_decodes(
    fleet: Fleet, stub: Any, decode: LoadWatch, asked: list[Any]
) -> list[Answer]:
    """Kill the decode worker while it runs all of these requests; return their answers."""
    for _ in range(9):
        calls, answers = [stub.Complete(one) for one in asked], [Answer() for _ in asked]
        for call, answer in zip(calls, answers, strict=True):
            answer.add(await call.read())
        async with fleet.frozen("vllm decode"):
            killed = (await _report(decode)).running_requests == len(asked)
            if killed:
                os.kill(fleet.workers["vllm decode"].pid, signal.SIGKILL)
        for call, answer in zip(calls, answers, strict=True):
            await _rest(call, answer)
        if killed:
            return answers
    raise AssertionError("the decode worker never ran all of them at once")


def _check(lost: Failure) -> None:
    assert lost.code is grpc.StatusCode.UNAVAILABLE, lost
    assert lost.reason in _REASONS, lost
    assert lost.retryable
