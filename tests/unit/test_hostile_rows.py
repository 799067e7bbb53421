"""The benchmark of hostile callers: its rows can be run, and each point that it judges can fail."""

from __future__ import annotations

import dataclasses
import inspect

import hpack
import pytest

from tests.benchmarks.hostile import wire
from tests.benchmarks.hostile.attacker import Attack, Order
from tests.benchmarks.hostile.attacks import ATTACKS, methods
from tests.benchmarks.hostile.normal import Chat
from tests.benchmarks.hostile.results import Result
from tests.benchmarks.hostile.rows import ROWS, Row

IDLE_P99_MS = (80.0, 90.0)
REPORT = {"broken": [], "connections": 1, "calls": 1, "answers": {}, "sent_bytes": 1}
NORMAL = [Chat(0.0, 0.1, "OK", "", new=new) for new in (False, True)]


def _result() -> Result:
    chats = NORMAL
    return Result(
        Row(name="r", attack="a", memory_mb=50.0),
        *(1.0, chats, chats, 100.0, 120.0, 0.1, 0.1, REPORT),
        stopped=False,
        after_mb=105.0,
    )


def test_a_row_that_keeps_all_limits_holds() -> None:
    assert _result().broken(IDLE_P99_MS) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"during": [*NORMAL, Chat(0.0, 0.1, "UNAVAILABLE", "gone")]}, "normal chats failed"),
        ({"during": [*NORMAL, Chat(0.0, 0.7, "OK", "")]}, "p99 700 ms, above 500"),
        (
            {"during": [*NORMAL, Chat(0.0, 0.7, "OK", "", new=True)]},
            "p99 on new connections 700 ms, above 500",
        ),
        ({"peak_mb": 151.0}, "memory 100 -> 151 MB"),
        ({"stopped": True}, "the attack was ended there"),
        ({"after_mb": 111.0}, "1.11 x idle"),
        ({"log_lines": 101}, "101 log lines"),
        ({"forged": 1}, "1 forged fields"),
        ({"probe_s": 1.5}, "a probe took 1.5 s after the attack"),
        ({"alive": False}, "the Processor ended"),
        ({"worker_alive": False}, "the worker ended"),
        ({"report": {**REPORT, "connections": 0, "calls": 0}}, "reached nothing"),
        ({"report": {**REPORT, "broken": ["a control failed"]}}, "a control failed"),
    ],
)
def test_a_point_that_does_not_hold_is_told(change: dict[str, object], sentence: str) -> None:
    alone = NORMAL  # 5 times this is the limit of p99
    (told,) = dataclasses.replace(_result(), alone=alone, **change).broken(IDLE_P99_MS)  # type: ignore[arg-type]
    assert sentence in told


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_every_row_names_an_attack_and_its_arguments(row: Row) -> None:
    if row.attack == "connections.certificate":  # its files are known when the row runs
        return
    attack = Attack(Order(attack=row.attack, port=1, seconds=1.0))
    inspect.signature(ATTACKS[row.attack]).bind(attack, **row.knobs)


def test_the_table_of_the_issue_is_covered() -> None:
    assert {row.number for row in ROWS.values()} >= {str(number) for number in range(1, 13)}


def test_header_blocks_are_what_hpack_reads() -> None:
    block = wire.headers(methods.CHAT, "k" * 200, [(b"x-more", b"v" * 300)])
    block += wire.literal(b"x-table", b"v", indexed=True) + b"\xbe"
    found = {str(name): str(value) for name, value in hpack.Decoder().decode(block)}
    assert found == {
        ":method": "POST",
        ":scheme": "http",
        ":path": methods.CHAT,
        ":authority": "processor",
        "content-type": "application/grpc",
        "te": "trailers",
        "authorization": "Bearer " + "k" * 200,
        "x-more": "v" * 300,
        "x-table": "v",
    }
