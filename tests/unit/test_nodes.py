"""A model over several machines: which settings fit together, and what SGLang is told."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.engines.adapter import NodeSettings
from millstream_server.engines.sglang.adapter import check_parts
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.runtime.settings import SettingsError, load
from tests.support.engines.engine_arguments import read_as

_LEADER = "leader.example:20000"
_KNOWN = {
    "model_path", "device", "dtype", "log_level", "skip_tokenizer_init", "disaggregation_mode",
    "incremental_streaming_output", "enable_metrics", "nnodes", "node_rank", "dist_init_addr",
}  # fmt: skip


def _check(topology: NodeSettings, **arguments: Any) -> None:
    check_parts(topology, read_as(**arguments))


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({}, {}),
        ({}, {"tp_size": 8}),
        ({"nodes": 2, "leader_address": _LEADER}, {"tp_size": 16}),
        ({"nodes": 4, "node_rank": 3, "leader_address": "[::1]:1"}, {"tp_size": 2, "pp_size": 2}),
    ],
)
def test_settings_that_fit(settings: dict[str, Any], arguments: dict[str, Any]) -> None:
    _check(NodeSettings(**settings), **arguments)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"nodes": 0}, "--nodes is 0, not 1 or more"),
        ({"node_rank": 1}, "--node-rank 1: with --nodes 1 ranks are 0 to 0"),
        ({"nodes": 2, "node_rank": 2}, "--node-rank 2: with --nodes 2 ranks are 0 to 1"),
        ({"nodes": 2}, "--nodes 2 needs --leader-address HOST:PORT, .* it is ''"),
        ({"nodes": 2, "leader_address": "leader"}, "it is 'leader'"),
        ({"nodes": 2, "leader_address": ":20000"}, "it is ':20000'"),
        ({"nodes": 2, "leader_address": "leader:70000"}, "it is 'leader:70000'"),
        (
            {"nodes": 2, "leader_address": _LEADER},
            r"tp_size x pp_size is 3, which 2 processes can't share evenly; give -- --tp-size 6",
        ),
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        _check(NodeSettings(**settings), tp_size=3)


@pytest.mark.parametrize("sizes", [{"tp_size": 0}, {"tp_size": -2, "pp_size": -1}])
def test_nothing_can_not_be_shared(sizes: dict[str, int]) -> None:
    with pytest.raises(SettingsError, match="can't share evenly; give -- --tp-size"):
        _check(NodeSettings(nodes=2, leader_address=_LEADER), **sizes)


@pytest.mark.parametrize("cls", [WorkerSettings, EmbeddingSettings])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ["--engine", "simulated", "--nodes", "2"],
            "--nodes 2, --node-rank 0: the simulated engine runs in one process",
        ),
        (["--nodes", "2"], "--nodes 2 needs --leader-address"),
        (["--nodes", "2", "--leader-address", _LEADER], "tp_size x pp_size is 1"),
    ],
)
def test_services_check_them(
    capsys: pytest.CaptureFixture[str], cls: type[Any], flags: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(cls, flags, {}, prog="p", description="d")
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_sglang_is_told(rank: int) -> None:
    config = SglangEngineConfig(
        model_path="m", device="cuda", nodes=2, node_rank=rank, leader_address=_LEADER
    )
    arguments = engine_arguments(config, _KNOWN)
    told = {name: arguments[name] for name in ("nnodes", "node_rank", "dist_init_addr")}
    assert told == {"nnodes": 2, "node_rank": rank, "dist_init_addr": _LEADER}
    blocks = {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"} if rank else {}
    assert engine_environment(config) == blocks


def test_one_node_is_told_nothing() -> None:
    config = SglangEngineConfig(model_path="m", device="cuda", role=Role.AGGREGATED)
    assert not {"nnodes", "node_rank", "dist_init_addr"} & engine_arguments(config, _KNOWN).keys()
