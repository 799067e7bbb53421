"""How SGLang is started: its arguments and environment, from our settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang import config as sglang_config
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.generation.sampling import Ability
from millstream_server.runtime.errors import (
    EngineFailedError,
)

_KNOWN = {
    "model_path", "device", "dtype", "log_level", "skip_tokenizer_init",
    "incremental_streaming_output", "disaggregation_mode", "enable_deterministic_inference",
    "max_total_tokens", "max_running_requests", "context_length", "host", "page_size",
    "disaggregation_transfer_backend", "disaggregation_bootstrap_port", "attention_backend",
    "sampling_backend", "disable_cuda_graph", "sleep_on_idle",
    "disaggregation_decode_retraction_backup", "enable_metrics", "served_model_name",
}  # fmt: skip


def _config(**changes: Any) -> SglangEngineConfig:
    return SglangEngineConfig(**{"model_path": "m", "device": "cpu", **changes})


def test_arguments_on_the_cpu() -> None:
    arguments = engine_arguments(_config(), _KNOWN)
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["incremental_streaming_output"] is True
    assert arguments["disaggregation_mode"] == "null"
    assert arguments["dtype"] == "float32"
    assert arguments["attention_backend"] == "torch_native"
    assert arguments["max_total_tokens"] == 8192


def test_arguments_of_adapters_and_of_the_memory_saver() -> None:
    known = _KNOWN | {
        "enable_lora", "max_loras_per_batch", "max_lora_rank", "lora_target_modules",
        "lora_backend", "enable_memory_saver", "enable_weights_cpu_backup",
    }  # fmt: skip
    off = engine_arguments(_config(), known)
    assert not known - _KNOWN & off.keys()
    on = engine_arguments(_config(max_loras_per_batch=3, lora_target_modules=("q_proj",)), known)
    assert on["enable_lora"] is True
    assert on["max_loras_per_batch"] == 4  # requests without one count as one
    assert on["lora_target_modules"] == ["q_proj"]
    assert on["lora_backend"] == "torch_native"
    saver = engine_arguments(_config(device="cuda", memory_saver=True), known)
    assert saver["enable_memory_saver"] is saver["enable_weights_cpu_backup"] is True


def test_a_gpu_gets_no_cpu_arguments() -> None:
    arguments = engine_arguments(_config(device="cuda"), _KNOWN)
    assert not {"attention_backend", "disable_cuda_graph", "max_total_tokens"} & set(arguments)
    assert arguments["dtype"] == "auto"


def test_arguments_of_the_two_halves() -> None:
    prefill = engine_arguments(_config(role=Role.PREFILL, bootstrap_port=9), _KNOWN)
    assert prefill["disaggregation_mode"] == "prefill"
    assert prefill["disaggregation_bootstrap_port"] == 9
    decode = engine_arguments(_config(role=Role.DECODE), _KNOWN)
    assert decode["disaggregation_mode"] == "decode"
    assert decode["disaggregation_decode_retraction_backup"] == "cpu_tensor"
    assert "disaggregation_bootstrap_port" not in decode


def test_settings_beat_defaults_and_extra_adds() -> None:
    config = _config(max_total_tokens=99, extra={"page_size": 16, "sleep_on_idle": False})
    arguments = engine_arguments(config, _KNOWN)
    assert arguments["max_total_tokens"] == 99
    assert arguments["page_size"] == 16
    assert arguments["sleep_on_idle"] is False


@pytest.mark.parametrize("name", ["no_such_argument", "skip_tokenizer_init", "model_path"])
def test_extra_that_is_unknown_or_ours_is_refused_by_name(name: str) -> None:
    with pytest.raises(EngineFailedError, match=name):
        engine_arguments(_config(extra={name: 1}), _KNOWN)


def test_an_sglang_that_lost_an_argument_is_refused_by_name() -> None:
    with pytest.raises(EngineFailedError, match="incremental_streaming_output"):
        engine_arguments(_config(), _KNOWN - {"incremental_streaming_output"})


def test_time_outs_and_the_address_reach_the_transfer() -> None:
    environment = engine_environment(_config(role=Role.DECODE, handoff_wait_s=1.2))
    assert environment["SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT"] == "2"
    assert environment["SGLANG_DISAGGREGATION_WAITING_TIMEOUT"] == "2"
    assert environment["SGLANG_HOST_IP"] == "127.0.0.1"
    assert engine_environment(_config()) == {}


@pytest.mark.parametrize(
    ("host", "files", "devices"),
    [
        ("127.0.0.1", (), "lo"),
        ("::1", (), "lo"),
        ("127.0.0.1", ("mlx5_0",), None),
        ("192.0.2.1", (), None),
    ],
)
def test_on_loopback_ucx_listens_there_alone(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    host: str,
    files: tuple[str, ...],
    devices: str | None,
) -> None:
    monkeypatch.setattr(sglang_config, "_RDMA", tmp_path)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    for name in files:
        (tmp_path / name).touch()
    config = _config(role=Role.PREFILL, bootstrap_host=host)
    assert engine_environment(config).get("UCX_NET_DEVICES") == devices
    monkeypatch.setenv("UCX_NET_DEVICES", "eth7")  # the operator's
    assert engine_environment(config).get("UCX_NET_DEVICES", "eth7") == "eth7"


@pytest.mark.parametrize(
    ("more", "alone"),
    [
        ({}, True),
        ({"extra": {"page_size": 16}}, True),
        ({"extra": {"tp_size": 2}}, False),
        ({"nodes": 2, "leader_address": "a:1"}, False),
    ],
)
def test_only_one_process_meets_nobody(
    more: dict[str, Any],
    alone: bool,  # noqa: FBT001
) -> None:
    assert _config(**more).computes_alone is alone


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL, Role.DECODE])
def test_an_engine_with_grammars_survives_one_that_allows_no_token(role: Role) -> None:
    """Drawing from logits that are all -inf would end the scheduler; `test_pair` does it."""
    environment = engine_environment(_config(role=role, engine_tokenizer=True))
    assert environment["SGLANG_SANITIZE_NAN_LOGITS"] == "1"


def test_the_time_of_grammars_reaches_sglang() -> None:
    environment = engine_environment(_config(engine_tokenizer=True, grammar_timeout_s=12.5))
    polls = int(environment["SGLANG_GRAMMAR_MAX_POLL_ITERATIONS"])
    assert polls * float(environment["SGLANG_GRAMMAR_POLL_INTERVAL"]) == pytest.approx(12.5)


def test_abilities_follow_the_settings() -> None:
    always = {Ability.LOGIT_BIAS, Ability.PROMPT_LOGPROBS}
    assert _config().abilities() == always
    assert _config(role=Role.DECODE).abilities() == {Ability.LOGIT_BIAS}
    everything = _config(deterministic=True, engine_tokenizer=True).abilities()
    assert everything == frozenset(Ability) - {Ability.RESUMED_OUTPUT}, "it has to be shown"
    other = _config(engine_tokenizer=True, extra={"grammar_backend": "llguidance"}).abilities()
    assert Ability.CONSTRAINTS in other
    assert Ability.STRUCTURAL_TAGS not in other


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({}, True),
        ({"role": Role.DECODE}, True),
        ({"role": Role.DIFFUSION}, False),
        ({"engine_tokenizer": False}, False),
        ({"nodes": 2}, False),
        ({"extra": {"grammar_backend": "llguidance"}}, False),
        ({"extra": {"speculative_algorithm": "EAGLE"}}, False),
        ({"extra": {"tp_size": 2}}, False),
    ],
)
def test_requests_are_resumed_only_where_it_was_tried(
    changes: dict[str, Any], *, may: bool
) -> None:
    assert _config(**{"engine_tokenizer": True, **changes}).may_resume is may
