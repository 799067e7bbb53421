"""What is taken out of SGLang's batches, and what is left to SGLang; the batches are made here."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.engines.sglang.loads import RankProgress
from millstream_server.engines.sglang.requests.batches import BatchReader
from millstream_server.generation.output import TokenLogprob

_SKIPPED = "HEALTH_CHECK"
_LENGTH = {"type": "length", "length": 1}


class TokenBatch(SimpleNamespace):
    """As SGLang's `BatchTokenIDOutput`."""


class VectorBatch(SimpleNamespace):
    """One of another kind."""


@dataclass
class Request:
    """A request of ours."""

    broken: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> None:
        if self.broken:
            raise ZeroDivisionError
        self.token_ids += token_ids
        self.logprobs += logprobs

    def give_up(self, error: Exception) -> None:
        self.errors.append(error)


class Times(SimpleNamespace):
    """As SGLang's `APIServerReqTimeStats`."""

    def set_first_token_time(self, at_s: float) -> None:
        self.first_token_time = self.last_time = at_s

    def set_last_time(self, at_s: float) -> None:
        self.last_time = at_s

    def set_response_sent_to_client_time(self, at_s: float) -> None:
        self.response_sent_to_client_time = at_s


def _state(top: int | None = None) -> SimpleNamespace:
    asked = SimpleNamespace(return_logprob=top is not None, top_logprobs_num=top or 0)
    return SimpleNamespace(
        out_list=[],
        obj=asked,
        time_stats=Times(first_token_time=0.0, last_time=0.0),
        ttft_observed=False,
        last_completion_tokens=1,
    )


class Manager:
    """As SGLang's TokenizerManager, as far as it is used."""

    def __init__(self, *rids: str, metrics: bool = False) -> None:
        self.rid_to_state = {rid: _state() for rid in rids}
        self.enable_metrics = metrics
        self.enable_priority_scheduling = False
        self.metrics_collector = self
        self.labels = {"model_name": "tiny"}
        self.handled: list[list[str]] = []
        self.collected: list[str] = []
        self.observed: list[tuple[float, int]] = []

    async def _handle_batch_output(self, batch: Any) -> None:
        self.handled.append(list(batch.rids))

    def collect_metrics(self, state: Any, batch: Any, i: int) -> None:
        self.collected.append(batch.rids[i])
        state.ttft_observed = True
        state.last_completion_tokens = batch.completion_tokens[i]

    def observe_inter_token_latency(self, labels: Any, seconds: float, tokens: int) -> None:
        assert labels == self.labels
        self.observed.append((seconds, tokens))

    async def receive(self, batch: Any) -> None:
        """Do what SGLang's `handle_loop` does."""
        await self._handle_batch_output(batch)


def _batch(parts: dict[str, list[int]], **lists: Any) -> TokenBatch:
    values = {
        "finished_reasons": [None] * len(parts),
        "completion_tokens": [len(ids) for ids in parts.values()],
        "input_token_logprobs_val": None,
        "dp_ranks": None,
        **lists,
    }
    return TokenBatch(rids=list(parts), output_ids=list(parts.values()), **values)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the two modules that are looked at in SGLang's place."""
    messages = SimpleNamespace(BatchTokenIDOutput=TokenBatch, BatchStrOutput=TokenBatch)
    constants = SimpleNamespace(HEALTH_CHECK_RID_PREFIX=_SKIPPED)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", messages)
    monkeypatch.setitem(sys.modules, "sglang.srt.constants", constants)


def _ours(manager: Manager, **requests: Request) -> RankProgress:
    progress = RankProgress()
    BatchReader(manager, requests, progress)
    return progress


async def test_tokens_reach_their_requests_and_not_sglang() -> None:
    manager, a, b = Manager("a", "b"), Request(), Request()
    progress = _ours(manager, a=a, b=b)
    await manager.receive(_batch({"a": [5], "b": [6, 7]}, dp_ranks=[2, 2]))
    await manager.receive(_batch({"b": [8]}))
    assert (a.token_ids, b.token_ids) == ([5], [6, 7, 8])
    assert manager.handled == []
    assert [progress.of(rank) for rank in range(3)] == [1, 0, 1]
    assert manager.rid_to_state["a"].time_stats.first_token_time > 0


async def test_an_end_and_a_foreign_request_go_on_to_sglang() -> None:
    manager, a, b = Manager("a", "b", "foreign"), Request(), Request()
    _ours(manager, a=a, b=b)
    ends = [None, None, _LENGTH]
    await manager.receive(_batch({"a": [5], "foreign": [9], "b": [6]}, finished_reasons=ends))
    assert manager.handled == [[_SKIPPED, "foreign", "b"]]
    assert (a.token_ids, b.token_ids) == ([5], [])


async def test_what_sglang_has_not_handed_out_comes_first() -> None:
    manager, a = Manager("a"), Request()
    _ours(manager, a=a)
    await manager.receive(_batch({"a": [5]}, input_token_logprobs_val=[[-1.0]]))
    manager.rid_to_state["a"].out_list.append({"output_ids": [5]})
    await manager.receive(_batch({"a": [6]}))
    manager.rid_to_state["a"].out_list.clear()
    await manager.receive(_batch({"a": [7]}))
    assert manager.handled == [["a"], ["a"]]
    assert a.token_ids == [7]


async def test_others_get_a_turn_after_each_batch() -> None:
    """SGLang's loop may have the next batch at hand, and would then not wait for it."""
    manager, turn = Manager("a"), asyncio.Event()
    _ours(manager, a=Request())
    asyncio.get_running_loop().call_soon(turn.set)
    await manager.receive(_batch({"a": [5]}))
    assert turn.is_set()


async def test_other_batches_and_forgotten_requests_are_sglangs() -> None:
    manager, a = Manager(), Request()
    _ours(manager, a=a)
    await manager.receive(VectorBatch(rids=["a"]))
    await manager.receive(_batch({"a": [5]}))
    assert manager.handled == [["a"], ["a"]]
    assert a.token_ids == []


async def test_a_request_that_fails_does_not_take_others_along() -> None:
    manager, a, b = Manager("a", "b"), Request(broken=True), Request()
    _ours(manager, a=a, b=b)
    await manager.receive(_batch({"a": [5], "b": [6]}))
    assert [type(error) for error in a.errors] == [ZeroDivisionError]
    assert b.token_ids == [6]


async def test_logprobs_and_their_alternatives() -> None:
    manager, a, b, c = Manager("a", "b", "c"), Request(), Request(), Request()
    manager.rid_to_state |= {"a": _state(top=2), "b": _state(top=0)}
    _ours(manager, a=a, b=b, c=c)
    batch = _batch(
        {"a": [5, 6], "b": [7], "c": [8]},
        input_token_logprobs_val=[[], [], []],
        output_token_logprobs_val=[[-0.1, -0.2], [-0.3], []],
        output_token_logprobs_idx=[[5, 6], [7], []],
        output_top_logprobs_val=[[[-0.1, -2.0], None], [None], []],
        output_top_logprobs_idx=[[[5, 9], None], [None], []],
    )
    await manager.receive(batch)
    assert a.logprobs == [TokenLogprob(5, -0.1, ((5, -0.1), (9, -2.0))), TokenLogprob(6, -0.2)]
    assert b.logprobs == [TokenLogprob(7, -0.3)]
    assert c.logprobs == []


async def test_sglangs_metrics_count_each_token_once() -> None:
    manager = Manager("a", "b", metrics=True)
    _ours(manager, a=Request(), b=Request())
    for step in range(1, 4):
        done = [step, 2 * step]  # b gets two tokens a step
        await manager.receive(_batch({"a": [5], "b": [6, 7]}, completion_tokens=done))
    assert manager.collected == ["a", "b"]  # the first, for the time to the first token
    assert sum(tokens for _, tokens in manager.observed) == 2 + 4
    times = [state.time_stats for state in manager.rid_to_state.values()]
    waited_s = sum(each.last_time - each.first_token_time for each in times)
    assert sum(seconds for seconds, _ in manager.observed) == pytest.approx(waited_s)
