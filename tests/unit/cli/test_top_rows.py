"""The numbers of `millstream top`, of states that tests make up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from millstream.v1 import worker_pb2
from millstream_server.cli.top.rows import (
    Counts,
    Meter,
    Mood,
    Reach,
    Row,
    WorkerState,
    loading_line,
    model_rows,
    sort_rows,
    status_of,
)

DECODE, PREFILL = worker_pb2.WORKER_ROLE_DECODE, worker_pb2.WORKER_ROLE_PREFILL
AGGREGATED = worker_pb2.WORKER_ROLE_AGGREGATED


def _state(address: str = "a:1", role: Any = AGGREGATED, **fields: Any) -> WorkerState:
    info = worker_pb2.WorkerInfo(worker_id=f"id-{address}", role=role, model="m")
    state = WorkerState(address, reach=Reach.REACHED, serving=True, info=info)
    for name, value in fields.items():
        setattr(state, name, value)
    return state


def _report(state: WorkerState, at_s: float, tokens: Sequence[int], **fields: Any) -> None:
    prompt, cached, completion = tokens
    state.load = worker_pb2.LoadReport(
        prompt_tokens_total=prompt,
        cached_tokens_total=cached,
        completion_tokens_total=completion,
        **fields,
    )
    state.load_s = at_s


def _row(meter: Meter, state: WorkerState, now_s: float) -> Row:
    (row,) = meter.rows([state], now_s)
    return row


# ---- rates


def test_rates_are_of_two_reports() -> None:
    meter, state = Meter(), _state()
    _report(state, 10.0, (1000, 100, 50))
    first = _row(meter, state, 10.5)
    assert (first.now, first.total) == (None, Counts(1000, 100, 50))
    _report(state, 12.0, (1400, 400, 90))
    second = _row(meter, state, 12.3)
    assert second.tokens_per_s == pytest.approx(20.0)
    assert second.hits_now == pytest.approx(0.75)
    assert second.total is not None
    assert second.total.hit_rate == pytest.approx(400 / 1400)


def test_without_a_new_report_nothing_has_happened() -> None:
    meter, state = Meter(), _state()
    _report(state, 10.0, (10, 0, 50))
    _row(meter, state, 10.5)
    idle = _row(meter, state, 13.0)
    assert idle.now is not None
    assert idle.tokens_per_s == 0
    assert idle.hits_now is None
    _report(state, 13.5, (10, 0, 60))
    busy = _row(meter, state, 14.0)
    assert busy.tokens_per_s == pytest.approx(20.0), "since the last refresh, not since 10.0"


@pytest.mark.parametrize("worker_id", ["id-a:1", "another"])
def test_a_worker_that_began_anew_has_no_rate(worker_id: str) -> None:
    meter, state = Meter(), _state()
    _report(state, 10.0, (1000, 100, 50))
    _row(meter, state, 10.5)
    assert state.info is not None
    state.info.worker_id = worker_id
    _report(state, 11.0, (5, 0, 2))
    assert _row(meter, state, 11.5).now is None


# ---- states in words


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, ("serving", Mood.GOOD)),
        ({"serving": False}, ("not serving", Mood.BAD)),
        ({"listed": False}, ("gone", Mood.GONE)),
        ({"reach": Reach.CONNECTING}, ("connecting", Mood.PASSING)),
        ({"reach": Reach.LOST, "serving": None}, ("unreachable", Mood.BAD)),
        ({"draining": True, "serving": False}, ("shutting down", Mood.PASSING)),
        ({"problem": "no worker"}, ("unknown", Mood.BAD)),
        ({"came_back": "restarted", "since_s": 95.0}, ("serving, restarted", Mood.GOOD)),
        ({"came_back": "back", "since_s": 89.0}, ("serving", Mood.GOOD)),
    ],
)
def test_a_state_is_a_few_words(fields: dict[str, Any], said: tuple[str, Mood]) -> None:
    assert status_of(_state(**fields), now_s=100.0) == said


@pytest.mark.parametrize(
    ("progress", "said"),
    [
        ({"stage": "STARTING"}, "starting"),
        (
            {"files_done": 3, "files_total": 12, "bytes_done": 4, "bytes_total": 10},
            "loading: 3 of 12 files, 40 %",
        ),
        ({"bytes_done": 20, "bytes_total": 10}, "loading: 100 %"),
        ({}, "loading"),
        ({"stage": "PREPARING", "files_done": 1, "files_total": 1}, "preparing"),
        ({"stage": "WARMING_UP"}, "warming up"),
    ],
)
def test_a_start_is_shown_while_it_lasts(progress: dict[str, Any], said: str) -> None:
    stage = worker_pb2.LoadStage.Value(f"LOAD_STAGE_{progress.pop('stage', 'LOADING_WEIGHTS')}")
    message = worker_pb2.WatchLoadProgressResponse(stage=stage, **progress)
    assert loading_line(message) == said
    state = _state(serving=False, progress=message)
    assert status_of(state, now_s=0.0) == (said, Mood.PASSING)
    state.progress = worker_pb2.WatchLoadProgressResponse(stage=worker_pb2.LOAD_STAGE_READY)
    assert status_of(state, now_s=0.0) == ("not serving", Mood.BAD), "another cause"


# ---- ranks, models, order


def test_progress_is_the_longest_of_busy_ranks() -> None:
    state = _state()
    _report(state, 1.0, (0, 0, 0), ranks=[worker_pb2.RankLoad(dp_rank=rank) for rank in range(3)])
    assert state.load is not None
    for rank, (running, idle_s) in zip(state.load.ranks, [(1, 2), (2, 7), (0, 60)], strict=True):
        rank.running_requests = running
        rank.since_progress.FromSeconds(idle_s)
    row = _row(Meter(), state, 1.0)
    assert [rank.idle_s for rank in row.ranks] == [2.0, 7.0, None]
    assert row.since_progress_s == 7.0


def test_a_models_prompts_and_tokens_count_once() -> None:
    meter = Meter()
    prefill, decode = _state("p:1", PREFILL), _state("d:1", DECODE, serving=False)
    lost = _state("x:1", DECODE, reach=Reach.LOST)
    for at_s, scale in ((0.0, 0), (2.0, 1)):
        _report(prefill, at_s, (100 * scale, 50 * scale, 2 * scale), running_requests=1)
        _report(decode, at_s, (100 * scale, 0, 40 * scale), used_blocks=5, total_blocks=10)
        rows = meter.rows([prefill, decode, lost], at_s)
    (model,) = model_rows(rows)
    assert (model.serving, model.workers) == (1, 3)
    assert (model.hits_now, model.hits) == (0.5, 0.5)
    assert model.tokens_per_s == pytest.approx(20.0)
    assert (model.running, model.used_blocks, model.total_blocks) == (1, 5, 10)


def test_rows_are_sorted_by_what_is_asked() -> None:
    busy, idle = _state("b:1", DECODE), _state("c:1", DECODE)
    first, silent = _state("z:1", PREFILL), _state("a:1", info=None, serving=None)
    _report(busy, 0.0, (10, 1, 0), running_requests=3, used_blocks=1, total_blocks=4)
    _report(idle, 0.0, (10, 9, 0), queued_requests=1, used_blocks=3, total_blocks=4)
    rows = Meter().rows([idle, silent, busy, first], 0.0)

    def order(key: str) -> str:
        return "".join(row.state.address[0] for row in sort_rows(rows, key))

    assert order("role") == "azbc", "by model, role, address"
    assert order("address") == "abcz"
    assert order("running") == "bcaz"
    assert order("queued") == "cbaz"
    assert order("kv") == "cbaz"
    assert order("hits") == "cbaz"
