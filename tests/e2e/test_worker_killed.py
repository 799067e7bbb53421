"""Kill -9 of a real SGLang worker: what it ran goes on at others, its engine goes, it comes back.

In a file of its own, late by name: it restarts a worker of the session's suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from millstream.v1 import processor_pb2, processor_pb2_grpc, sampling_pb2
from millstream_testing.waiting import EOF, until
from tests.e2e.conftest import Suite
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Answer, completion, gather, options, until_connected
from tests.support.wire.failures import failure

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_PROMPT = list(range(20, 60))
_LONG = options(temperature=0, max_new_tokens=1500, ignore_eos=True, return_token_ids=True)
_SHORT = options(temperature=0, max_new_tokens=8, ignore_eos=True, return_token_ids=True)
_TOKENS = 600
_COMPARED = 64
"""Tokens behind the loss. Penalties lost would be seen in the first ones: text without them repeats
itself. Text that doesn't comes to a near tie by and by, and that falls by what else is computed."""
_PATTERN = "(a{10}b{10}c{10}){18}"
_SAYS = ("a" * 10 + "b" * 10 + "c" * 10) * 18
_REGEX = sampling_pb2.Constraint(regex=_PATTERN)
_TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": _PATTERN}}
_BY_TAG = sampling_pb2.Constraint(structural_tag=json.dumps(_TAG))
_WORDS = {"type": "array", "minItems": 60, "maxItems": 60, "items": {"const": "millstream"}}
_BY_SCHEMA = sampling_pb2.Constraint(json_schema=json.dumps(_WORDS))
CONTINUE = processor_pb2.REDISPATCH_WAY_CONTINUE
WITH_STATE = processor_pb2.REDISPATCH_WAY_CONTINUE_WITH_STATE
REPLAY = processor_pb2.REDISPATCH_WAY_REPLAY
_GOING_ON: dict[str, tuple[dict[str, Any], int]] = {
    "greedy": ({"ignore_eos": True}, CONTINUE),
    "min tokens": ({"min_new_tokens": _TOKENS}, CONTINUE),
    "penalty": ({"ignore_eos": True, "presence_penalty": 0.5}, WITH_STATE),
    "regex": ({"constraint": _REGEX}, WITH_STATE),
    "regex, sampled": ({"constraint": _REGEX, "temperature": 1.0}, WITH_STATE),
    "regex, by a structural tag": ({"constraint": _BY_TAG}, WITH_STATE),
    "JSON schema": ({"constraint": _BY_SCHEMA}, WITH_STATE),
    "logprobs": ({"ignore_eos": True, "logprobs": sampling_pb2.LogprobOptions()}, REPLAY),
}


async def _read_to_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]
        pass


@contextlib.contextmanager
def _front(suite: Suite, handoff: str, tmp_path: Path) -> Iterator[ServiceProcess]:
    """Run a Processor over all workers."""
    workers = ",".join(one.address for one in (suite.aggregated, suite.prefill, suite.decode))
    flags = {"models": f"tiny={suite.model}", "workers": workers, "handoff": handoff}
    made = ServiceProcess("millstream_server.processor", flags, tmp_path / "front-all.log")
    with running(made):
        yield made


class _Read:
    """A completion that is read as it comes, and when its tokens came."""

    def __init__(self, stub: Any, fields: dict[str, Any]) -> None:
        given = {"temperature": 0.0, "return_token_ids": True, **fields}
        opts = options(_TOKENS, **given)
        self.call = stub.Complete(completion(_PROMPT, opts))
        self.answer = Answer()
        self._came: list[tuple[int, float]] = []

    async def read(self) -> bool:
        if (response := await self.call.read()) is EOF:
            return False
        self.answer.add(response)
        self._came.append((self.answer.choices[0].token_count, time.monotonic()))
        return True

    def after(self, tokens: int) -> float:
        """Return when the first token after so many came."""
        return next(came_s for count, came_s in self._came if count > tokens)

    async def end(self) -> Answer:
        while await self.read():
            pass
        return self.answer


@pytest.mark.parametrize(("handoff", "victim"), [("never", "aggregated"), ("always", "decode")])
async def test_what_a_killed_worker_ran_goes_on_at_others(
    suite: Suite, handoff: str, victim: str, tmp_path: Path
) -> None:
    """From an aggregated worker to a hand-off pair, and the other way round."""
    lost: ServiceProcess = getattr(suite, victim)
    try:
        with _front(suite, handoff, tmp_path) as front:
            await _goes_on(front, lost)
    finally:  # tests behind this one need it
        lost.kill()
        lost.start()
        await lost.until_serving(timeout_s=200)
        for front in (suite.front_aggregated, suite.front_disaggregated):
            await front.until_serving(timeout_s=20)


async def _goes_on(front: ServiceProcess, lost: ServiceProcess) -> None:
    async with grpc.aio.insecure_channel(front.address) as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        await until_connected(stub, 3)
        alone = [_Read(stub, fields).end() for fields, _ in _GOING_ON.values()]
        undisturbed = dict(zip(_GOING_ON, await asyncio.gather(*alone), strict=True))
        reads = {name: _Read(stub, fields) for name, (fields, _) in _GOING_ON.items()}
        for one in reads.values():
            await one.read()
        ends = [asyncio.ensure_future(one.end()) for one in reads.values()]
        await asyncio.sleep(0.3)
        os.kill(lost.pid, signal.SIGKILL)
        killed_s = time.monotonic()
        await asyncio.gather(*ends)
        for name, one in reads.items():
            answer, before = one.answer, undisturbed[name]
            assert answer.finished
            ((way, tokens),) = [(r.way, r.token_count) for r in answer.finished.redispatches]
            assert way == _GOING_ON[name][1]
            assert 0 < tokens < _TOKENS
            compared = tokens + _COMPARED if name == "penalty" else None
            if compared is None:
                assert answer.choices[0].text == before.choices[0].text, name
            assert ("regex" in name) == (answer.choices[0].text == _SAYS)
            assert answer.finish_reason == before.finish_reason
            assert answer.usage.prompt_tokens == before.usage.prompt_tokens
            if name != "regex, sampled":  # the same text may be other tokens
                ids, wanted = answer.choices[0].token_ids, before.choices[0].token_ids
                assert ids[:compared] == wanted[:compared], name
                assert answer.usage.completion_tokens == before.usage.completion_tokens
            if way == CONTINUE:
                pause_s = one.after(tokens) - killed_s
                assert pause_s < 5.0, "a second, and a prefill beside others on two busy cores"


async def test_kill_nine(suite: Suite) -> None:
    worker = suite.aggregated
    children = psutil.Process(worker.pid).children(recursive=True)
    assert children, "SGLang's own processes"
    async with (
        grpc.aio.insecure_channel(suite.front_aggregated.address) as channel,
        grpc.aio.insecure_channel(suite.front_disaggregated.address) as other_channel,
    ):
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        other = processor_pb2_grpc.ProcessorServiceStub(other_channel)
        before = await gather(stub.Complete(completion(_PROMPT, _SHORT)))
        calls = [stub.Complete(completion(_PROMPT, _LONG)) for _ in range(4)]
        for call in calls:
            await call.read()
        neighbour = asyncio.ensure_future(gather(other.Complete(completion(_PROMPT, _SHORT))))
        os.kill(worker.pid, signal.SIGKILL)
        killed = time.monotonic()
        try:
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await _read_to_end(call)
                lost = failure(caught.value)
                assert lost.code is grpc.StatusCode.UNAVAILABLE
                assert lost.reason == "WORKER_LOST"
                assert lost.retryable
            assert time.monotonic() - killed < 5.0
            assert (await neighbour).choices[0].token_ids == before.choices[0].token_ids
            await until(lambda: not any(child.is_running() for child in children), within_s=10)
        finally:  # tests behind this one need it
            worker.kill()
            worker.start()
            await worker.until_serving(timeout_s=200)
            await suite.front_aggregated.until_serving(timeout_s=20)
        after = await gather(stub.Complete(completion(_PROMPT, _SHORT)))
        assert after.choices[0].token_ids == before.choices[0].token_ids
