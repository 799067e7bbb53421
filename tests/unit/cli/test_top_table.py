"""The tables of `millstream top`."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from millstream.v1 import worker_pb2
from millstream_server.cli.top.rows import Meter, Reach, WorkerState, model_rows
from millstream_server.cli.top.table import as_object, bar, draw, percent, signs_of

ASCII = "#."


def _states(model: str = "m") -> list[WorkerState]:
    info = worker_pb2.WorkerInfo(
        worker_id="1",
        role=worker_pb2.WORKER_ROLE_DECODE,
        model=model,
        weight_version="v7",
        device="cpu",
    )
    info.adapters.add(name="sql")
    state = WorkerState("h:1", "decode-1", Reach.REACHED, serving=True, info=info)
    state.load = worker_pb2.LoadReport(
        running_requests=2,
        queued_requests=1,
        used_blocks=30,
        total_blocks=100,
        prompt_tokens_total=200,
        cached_tokens_total=50,
    )
    for rank in (0, 1):
        one = state.load.ranks.add(dp_rank=rank, running_requests=1, queued_tokens=1500 * rank)
        one.since_progress.FromMilliseconds(250)
    lost = WorkerState("h:2", "", Reach.LOST, since_s=90.0, problem="Connection refused")
    return [state, lost]


def _text(states: list[WorkerState], encoding: str = "utf-8", **options: Any) -> list[str]:
    rows = Meter().rows(states, 100.0)
    out = io.StringIO()
    console = Console(file=out, width=160)
    console.print(draw(rows, model_rows(rows), now_s=100.0, signs=signs_of(encoding), **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_has_workers_ranks_problems_and_models() -> None:
    lines = [" ".join(line.split()) for line in _text(_states(), "ascii")]
    assert lines == [
        (
            "worker role health run queue KV in use cached now in all tokens/s progress device "
            "weights adapters"
        ),
        "decode-1 h:1 decode serving 2 1 ###....... 30 % - 25 % - 0.2 s ago cpu v7 sql",
        "rank 0 1 0 - 0.2 s ago",
        "rank 1 1,500 tokens queued 1 0 - 0.2 s ago",
        "h:2 - unreachable - - - - - - - - - -",
        "h:2: unreachable for 10 s: Connection refused",
        "",
        "model serving run queue KV in use cached now in all tokens/s",
        "m 1 of 1 2 1 ###....... 30 % - - -",
    ]


def test_columns_that_would_say_nothing_are_left_out() -> None:
    states = _states()
    assert states[0].info is not None
    del states[0].info.adapters[:]
    states[0].info.device = ""
    assert not {"adapters", "device"} & {*_text(states)[0].split()}
    assert "model" not in _text(states)[0]
    other = WorkerState("h:3", reach=Reach.REACHED, info=worker_pb2.WorkerInfo(model="n"))
    assert "model" in _text([*states, other])[0]


def test_what_does_not_fit_is_counted() -> None:
    lines = _text(_states(), max_rows=1)
    assert "and 1 more; --once prints all" in lines
    assert not any("refused" in line for line in lines)


def test_a_narrow_screen_shows_less_but_nothing_cut_off() -> None:
    lines = _text(_states(), width=80)
    assert " ".join(lines[0].split()) == "worker health run queue KV in use tokens/s progress"
    assert " ".join(lines[1].split()) == "decode-1 serving 2 1 30 % - 0.2 s ago"
    assert not any("…" in line or len(line) > 80 for line in lines)
    assert "h:1" in _text(_states(), width=130)[1]


def test_without_a_terminal_there_are_no_colours() -> None:
    assert not any("\x1b" in line for line in _text(_states()))
    assert any("███░░░░░░░  30 %" in line for line in _text(_states()))


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0.0, ".........."), (0.001, "#........."), (0.5, "#####....."), (0.999, "#########."),
     (1.0, "##########")],
)  # fmt: skip
def test_a_bar_is_empty_or_full_only_at_the_ends(share: float, drawn: str) -> None:
    assert bar(share, ASCII) == drawn


def test_percent() -> None:
    assert [percent(share) for share in (None, 0.0, 0.254, 1.0)] == ["-", "0 %", "25 %", "100 %"]


def test_json_has_numbers_and_nulls() -> None:
    rows = Meter().rows(_states(), 100.0)
    read = json.loads(json.dumps(as_object(rows, model_rows(rows), (), "now")))
    one, lost = read["workers"]
    assert (one["running"], one["hits"], one["tokens_per_s"]) == (2, 0.25, None)
    assert (one["name"], one["adapters"], one["since_progress_s"]) == ("decode-1", ["sql"], 0.25)
    assert [(rank["queued_tokens"], rank["idle_s"]) for rank in one["ranks"]] == [
        (0, 0.25),
        (1500, 0.25),
    ]
    assert "state" not in one
    assert (lost["health"], lost["used_blocks"]) == ("unreachable", None)
    assert read["models"][0]["serving"] == 1
