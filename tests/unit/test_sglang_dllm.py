"""What the SGLang adapter adds for diffusion language models."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.control.engine import EngineLoad, Role
from millstream_server.engines.adapter import DllmSettings, EngineContext, TextEngineSettings
from millstream_server.engines.sglang.adapter import SglangSettings, engine_config
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    engine_arguments,
    engine_environment,
)
from millstream_server.engines.sglang.dllm import BlockBudget, check_model
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from tests.support.engines.engine_arguments import read_as

_SERVER_ARGS = {
    "device", "disable_cuda_graph", "disaggregation_mode", "dllm_algorithm", "dllm_fdfo", "dtype",
    "dllm_algorithm_config", "enable_metrics", "incremental_streaming_output", "log_level",
    "max_running_requests", "model_path", "served_model_name", "skip_tokenizer_init",
}  # fmt: skip


def _model(folder: Path, **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _context(path: Path, role: Role = Role.DIFFUSION, **dllm: Any) -> EngineContext:
    return EngineContext(
        role=role,
        model_path=path,
        model_name="m",
        common=TextEngineSettings(),
        dllm=DllmSettings(**dllm),
    )


# ---- settings


def test_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    context = _context(tmp_path, dllm_algorithm="LowConfidence")
    context = replace(context, common=TextEngineSettings(max_loras_per_batch=1))
    with pytest.raises(SettingsError, match="no LoRA for diffusion language models"):
        engine_config(SglangSettings(), context)


@pytest.mark.parametrize(
    ("dllm", "said"),
    [
        ({}, "--dllm-algorithm is required .* one of LowConfidence"),
        ({"dllm_algorithm": "Fastest"}, "'Fastest' is not one of LowConfidence"),
        (
            {"dllm_algorithm": "LowConfidence", "dllm_config": Path("/none.yaml")},
            "--dllm-config /none.yaml: there is no such file",
        ),
    ],
)
def test_a_missing_or_wrong_setting_is_named(
    tmp_path: Path, dllm: dict[str, Any], said: str
) -> None:
    with pytest.raises(SettingsError, match=said):
        engine_config(SglangSettings(), _context(_model(tmp_path), **dllm))


def test_other_roles_ignore_them(tmp_path: Path) -> None:
    context = _context(_model(tmp_path), Role.AGGREGATED, dllm_algorithm="LowConfidence")
    assert not engine_config(SglangSettings(), context).ability


def test_sglang_is_told(tmp_path: Path) -> None:
    file = tmp_path / "low.yaml"
    file.write_text("threshold: 0.5\n")
    context = _context(_model(tmp_path), dllm_algorithm="LowConfidence", dllm_config=file)
    common = TextEngineSettings(device="cuda", engine_args=read_as(dllm_fdfo=True))
    config = engine_config(SglangSettings(), replace(context, common=common))
    arguments = engine_arguments(config, _SERVER_ARGS)
    assert arguments["dllm_algorithm"] == "LowConfidence"
    assert arguments["dllm_algorithm_config"] == str(file)
    assert arguments["max_running_requests"] == 32, "SGLang's own is 1"
    assert arguments["disaggregation_mode"] == "null"
    assert arguments["dllm_fdfo"] is True, "an operator's word counts"
    assert engine_environment(config) == {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "0"}
    plain = SglangEngineConfig(model_path="m", device="cuda", role=Role.AGGREGATED)
    assert not {"dllm_algorithm", "dllm_fdfo"} & engine_arguments(plain, _SERVER_ARGS).keys()


# ---- models


def test_models_that_sglang_denoises_pass(tmp_path: Path) -> None:
    check_model(_model(tmp_path, architectures=["SDARForCausalLM"]))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is no diffusion language"),
        ({"architectures": []}, "names no architecture"),
        ({}, "names no architecture"),
    ],
)
def test_other_models_fail_with_a_sentence(
    tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineFailedError, match=said):
        check_model(_model(tmp_path, **config))


# ---- the KV cache


class _Runs:
    """Requests that hold their place until they are ended."""

    def __init__(self, budget: BlockBudget) -> None:
        self.running: list[str] = []
        self._budget = budget
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str, prompt: int, new: int) -> None:
        request = GenerationRequest(
            prompt=Prompt([1] * prompt), sampling=Sampling(max_new_tokens=new)
        )

        async def run() -> None:
            async with self._budget.room(request):
                self.running.append(name)
                try:
                    await asyncio.Event().wait()
                finally:
                    self.running.remove(name)

        self._tasks[name] = asyncio.ensure_future(run())
        await self.settle()

    async def end(self, *names: str) -> None:
        for name in names:
            self._tasks[name].cancel()
        for name in names:
            with contextlib.suppress(asyncio.CancelledError):
                await self._tasks[name]
        await self.settle()

    async def settle(self) -> None:
        for _ in range(4):
            await asyncio.sleep(0)


async def test_requests_wait_in_order_until_their_longest_answers_fit() -> None:
    runs = _Runs(BlockBudget(100, 4))
    await runs.start("a", 20, 19)  # 40 and three blocks: 52
    await runs.start("b", 4, 32)  # 48
    await runs.start("c", 30, 30)  # 72
    await runs.start("d", 1, 1)  # 16: fits beside a, but c came first
    assert runs.running == ["a", "b"]
    await runs.end("b")
    assert runs.running == ["a"]
    await runs.end("a")
    assert runs.running == ["c", "d"]


async def test_requests_that_hold_cache_count_as_running() -> None:
    budget = BlockBudget(100, 4)
    runs = _Runs(budget)
    for name in "abc":
        await runs.start(name, 10, 10)
    reported = EngineLoad(running_requests=0, queued_requests=3, used_blocks=5, total_blocks=25)
    assert runs.running == ["a", "b", "c"]
    assert budget.counted(reported, 2) == replace(reported, running_requests=2, queued_requests=1)
    await runs.end("a", "b", "c")
    idle = replace(reported, queued_requests=0)
    assert budget.counted(idle, 2) == idle


async def test_one_that_gives_up_waiting_lets_those_behind_it_go() -> None:
    runs = _Runs(BlockBudget(100, 4))
    await runs.start("a", 20, 19)
    await runs.start("b", 30, 30)
    await runs.start("c", 4, 32)
    assert runs.running == ["a"]
    await runs.end("b")
    assert runs.running == ["a", "c"]
    await runs.end("a", "c")
    await runs.start("d", 1000, 1000)
    assert runs.running == ["d"], "the largest runs alone"


async def test_room_that_is_given_to_one_that_just_gave_up_is_not_lost() -> None:
    runs = _Runs(BlockBudget(60, 4))
    await runs.start("a", 20, 19)
    await runs.start("b", 20, 19)
    await runs.start("c", 20, 19)
    await runs.end("a", "b")  # in one turn of the loop
    assert runs.running == ["c"]
