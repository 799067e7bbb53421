"""Health conditions: their owners, and the health that they result in."""

from __future__ import annotations

import logging

import pytest

from millstream.v1 import decode_pb2
from millstream_server.runtime.lifecycle.conditions import (
    DRAINING,
    LOADING,
    STUCK,
    HealthConditions,
)
from millstream_server.runtime.lifecycle.server import Server, ServerOptions

SERVICE = decode_pb2.DESCRIPTOR.services_by_name["DecodeService"].full_name


@pytest.fixture
def told() -> list[bool]:
    return []


@pytest.fixture
def conditions(told: list[bool]) -> HealthConditions:
    return HealthConditions(told.append)


def test_it_serves_while_none_holds_and_tells_of_each_change_once(
    conditions: HealthConditions, told: list[bool]
) -> None:
    loading = conditions.own(LOADING, holds=True)
    stuck = conditions.own(STUCK)
    assert conditions.holding == (LOADING,)
    assert told == [], "a process begins not serving"
    loading.clear()
    stuck.set()
    stuck.set()
    loading.set()
    stuck.clear()
    assert conditions.holding == (LOADING,)
    assert told == [True, False]
    loading.clear()
    assert conditions.serving
    assert told == [True, False, True]


def test_a_condition_has_one_owner(conditions: HealthConditions) -> None:
    conditions.own(STUCK)
    with pytest.raises(ValueError, match="'stuck' has an owner"):
        conditions.own(STUCK)


def test_one_that_holds_when_it_is_added_counts(
    conditions: HealthConditions, told: list[bool]
) -> None:
    conditions.own(LOADING, holds=True).clear()
    conditions.own(STUCK, holds=True)
    assert told == [True, False]


def test_the_log_names_what_holds(
    conditions: HealthConditions, caplog: pytest.LogCaptureFixture
) -> None:
    loading, stuck = conditions.own(LOADING, holds=True), conditions.own(STUCK)
    with caplog.at_level(logging.INFO):
        stuck.set()
        loading.clear()
    fields = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [f["conditions"] for f in fields] == ["loading,stuck", "stuck"]
    assert [(f["condition"], f["holds"]) for f in fields] == [("stuck", True), ("loading", False)]


async def test_a_server_joins_them_into_its_health() -> None:
    server = Server((SERVICE,), ServerOptions(max_receive_bytes=1 << 10))
    loading = server.conditions.own(LOADING, holds=True)
    stuck = server.conditions.own(STUCK)
    assert not server.health.states[SERVICE]
    loading.clear()
    assert server.health.states[SERVICE]
    stuck.set()
    assert not server.health.states[SERVICE]
    stuck.clear()
    assert server.health.states[SERVICE]
    server.begin_drain()
    assert server.conditions.holding == (DRAINING,)
    loading.set()
    loading.clear()
    assert not server.health.states[SERVICE], "a drain is for good"
    await server.stop(0)
