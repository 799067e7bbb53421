"""Whether SGLang is told to publish KV events, and where to."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.kv_events.feed import (
    KvEndpoints,
    KvEventFeed,
    endpoints,
    with_publisher,
)
from millstream_server.runtime.errors import EngineFailedError
from tests.support.processes.ports import free_port
from tests.support.worker.kv_view import KvView

_HERE = Path("/run/here")
_MACHINES: dict[str, Any] = {
    "nodes": 2,
    "leader_address": "127.0.0.1:20000",
    "extra": {"tp_size": 4, "dp_size": 4, "enable_dp_attention": True},
}


def _config(role: Role = Role.AGGREGATED, **fields: Any) -> SglangEngineConfig:
    return SglangEngineConfig(model_path="m", role=role, **fields)


def _found(config: SglangEngineConfig) -> KvEndpoints:
    there = endpoints(config, _HERE)
    assert there is not None
    return there


@pytest.mark.parametrize(
    ("config", "tells"),
    [
        (_config(), True),
        (_config(Role.PREFILL), True),
        (_config(Role.DIFFUSION), True),
        (_config(Role.DECODE), False),
        (_config(Role.DECODE, extra={"disaggregation_decode_enable_radix_cache": True}), True),
        (_config(Role.EMBEDDING), False),
        (_config(kv_events=False), False),
        (_config(extra={"disable_radix_cache": True}), False),
        (_config(extra={"speculative_algorithm": "EAGLE"}), False),
        (_config(extra={"speculative_algorithm": "NGRAM"}), True),
        (_config(**_MACHINES), False),
        (_config(**_MACHINES, kv_events_port=7000), True),
        (_config(**{**_MACHINES, "extra": {"tp_size": 4}}), True),
        (_config(**{**_MACHINES, "extra": {"tp_size": 4}}, node_rank=1), False),
    ],
)
def test_who_tells(config: SglangEngineConfig, tells: bool) -> None:  # noqa: FBT001
    assert (endpoints(config, _HERE) is not None) is tells


def test_ranks_of_one_machine_use_files() -> None:
    there = _found(_config(extra={"dp_size": 2}))
    assert (there.ranks, there.local_ranks) == (2, 2)
    assert there.bound_of(1) == "ipc:///run/here/tcp-events:1"
    assert there.replay_of(1) == "ipc:///run/here/tcp-replay:1"
    publisher = json.loads(there.publisher())
    assert publisher["endpoint"] == there.bound_of(0)
    assert publisher["replay_endpoint"] == there.replay_of(0)
    assert publisher["bind"] is False


def test_ranks_of_other_machines_connect_to_the_first() -> None:
    leader = _config(**_MACHINES, kv_events_port=7000)
    there = _found(leader)
    assert (there.ranks, there.local_ranks) == (4, 2)
    assert [there.bound_of(rank) for rank in (0, 3)] == [
        "tcp://127.0.0.1:7000",
        "tcp://127.0.0.1:7003",
    ]
    assert there.replay_of(1) == "ipc:///run/here/tcp-replay:1"
    assert not there.replay_of(2), "it can't be reached"
    follower = json.loads(with_publisher(replace(leader, node_rank=1)).kv_publisher)
    assert follower["endpoint"] == "tcp://127.0.0.1:7000"
    assert follower["replay_endpoint"] is None
    assert not with_publisher(replace(leader, node_rank=1, kv_events_port=0)).kv_publisher


@pytest.mark.parametrize(
    "extra",
    [
        {"dp_size": 4},
        {"dp_size": 4, "enable_dp_attention": True},
        {"attn_dp_size": 4},
        {"dp_size": 1, "attn_dp_size": 4},
    ],
)
def test_every_spelling_of_ranks_counts(extra: dict[str, Any]) -> None:
    assert _found(_config(extra=extra)).ranks == 4


async def test_a_port_in_use_is_named() -> None:
    config = _config(**_MACHINES, kv_events_port=free_port())
    first, second = KvEventFeed(), KvEventFeed()
    for feed in (first, second):
        feed.follow(KvView())
    assert first.open(config).kv_publisher
    with pytest.raises(EngineFailedError, match=f"kv_events_port: .*:{config.kv_events_port} "):
        second.open(config)
    for feed in (first, second):
        feed.close()
    assert KvEventFeed().open(config) == config, "nobody follows"
