"""What SGLang's operations need no engine for."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from millstream_server.control.engine import Role
from millstream_server.control.operations import PauseMode
from millstream_server.engines.adapter import TextEngineSettings
from millstream_server.engines.gate import Gate, Hold
from millstream_server.engines.open_request import OpenRequest
from millstream_server.engines.operations import measure
from millstream_server.engines.sglang.adapter import ADAPTER, SglangSettings, check_lora
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.control.operations import SglangPause
from millstream_server.engines.sglang.requests.translate import cancelled
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.errors import UnsupportedFeatureError, WorkerPausedError
from millstream_server.runtime.settings import EngineArguments, SettingsError
from millstream_server.runtime.settings.arguments import ReadArgument


async def test_requests_that_a_pause_ends_may_be_sent_again_after_a_moment() -> None:
    sink = CollectingSink()
    request = GenerationRequest(prompt=Prompt((1,)), sampling=Sampling(max_new_tokens=1))
    run = OpenRequest(request=request, sink=sink)
    run.pause_out()
    run.end(cancelled(run.request))
    with pytest.raises(WorkerPausedError) as caught:
        await sink.result()
    assert caught.value.retry_delay_s == 1.0


async def test_the_gate_opens_when_nothing_holds_it() -> None:
    gate = Gate()
    await gate.passed()
    gate.close(Hold.PAUSED)
    async with gate.closed(Hold.UPDATING):
        waiting = asyncio.create_task(gate.passed())
        await asyncio.sleep(0)
        assert not waiting.done()
        assert gate.holds(Hold.UPDATING)
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.release(Hold.PAUSED)
    assert gate.is_open
    await waiting


@pytest.mark.parametrize("role", [Role.DIFFUSION, Role.PREFILL, Role.DECODE])
async def test_roles_that_cannot_retract_refuse_it(role: Role) -> None:
    runs = SimpleNamespace(gate=Gate())
    engine: Any = SimpleNamespace(config=SglangEngineConfig(model_path="m", role=role), runs=runs)
    with pytest.raises(UnsupportedFeatureError, match="IN_PLACE or ABORT"):
        await SglangPause(engine).pause(PauseMode.RETRACT)
    assert runs.gate.is_open


def test_memory_is_that_of_the_processes() -> None:
    ours = measure([os.getpid()], on_gpu=False)
    assert ours.host_bytes > 10e6
    assert ours.device_bytes == 0
    assert measure([os.getpid(), 2**22 + 1], on_gpu=False).host_bytes < 2 * ours.host_bytes
    assert measure([2**22 + 1], on_gpu=False).host_bytes == 0


def _read(**values: object) -> EngineArguments:
    read = {name: ReadArgument(value, value, "flag") for name, value in values.items()}
    return EngineArguments(read=read)


def _check(values: dict[str, Any], arguments: dict[str, object]) -> None:
    check_lora(TextEngineSettings(**values), _read(**arguments))


@pytest.mark.parametrize(
    ("values", "arguments", "why"),
    [
        ({"max_loras_per_batch": -1}, {}, "is -1"),
        ({"max_loras_per_batch": 1}, {"max_lora_rank": 0}, "--max-lora-rank is 0"),
        ({"max_loras_per_batch": 1}, {"lora_target_modules": set()}, "name the layers"),
        ({"max_loras_per_batch": 1}, {"lora_target_modules": {"all"}}, "name the layers"),
        ({}, {"max_lora_rank": 64}, "need --max-loras-per-batch"),
        ({"max_loras_per_batch": 1}, {"dp_size": 2}, "--dp-size 2"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    values: dict[str, Any], arguments: dict[str, object], why: str
) -> None:
    with pytest.raises(SettingsError, match=why):
        _check(values, arguments)


def test_settings_that_work() -> None:
    _check({"max_loras_per_batch": 2}, {"tp_size": 8})
    _check({}, {"dp_size": 2})


def test_a_cpu_has_no_memory_to_save() -> None:
    given = EngineArguments(flags=("--enable-memory-saver",))
    offer, common = ADAPTER.generator, TextEngineSettings(device="cpu", engine_args=given)
    assert offer is not None
    with pytest.raises(SettingsError, match="--enable-memory-saver"):
        offer.checked("sglang", SglangSettings(), common)
