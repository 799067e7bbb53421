"""Starts that fail, and what they say; a start that is interrupted leaves nothing running."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from pathlib import Path

import psutil
import pytest

from millstream_server.control.engine import LoadStage, Role
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.runtime.errors import EngineFailedError
from millstream_testing.waiting import until

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session")]


async def _refused(config: VllmEngineConfig) -> str:
    engine = VllmEngine(config)
    with pytest.raises(EngineFailedError) as refused:
        await engine.start(lambda _: None)
    await engine.close()
    return refused.value.message


async def test_settings_that_vllm_refuses(model: Path) -> None:
    """In this process, before it starts any."""
    message = await _refused(VllmEngineConfig(model_path=str(model), context_length=10**7))
    assert message.startswith("vLLM can't start with these settings: ")


async def test_settings_that_its_core_refuses(model: Path) -> None:
    message = await _refused(VllmEngineConfig(model_path=str(model), extra={"block_size": 7}))
    assert message.startswith("vLLM's core process ended while it loaded the model; ")


async def test_an_argument_that_is_managed(model: Path) -> None:
    message = await _refused(VllmEngineConfig(model_path=str(model), extra={"max_num_seqs": 7}))
    assert message == ("extra: 'max_num_seqs' follows from the engine's other settings; set those.")


async def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = await _refused(
            VllmEngineConfig(model_path=str(model), role=Role.PREFILL, bootstrap_port=port)
        )
    assert message.startswith(f"bootstrap_port: {port} cannot be bound on 127.0.0.1")


async def test_a_start_that_is_closed(model: Path) -> None:
    engine = VllmEngine(VllmEngineConfig(model_path=str(model)))
    assert engine.load_progress().stage is LoadStage.STARTING
    starting = asyncio.ensure_future(engine.start(lambda _: None))
    before = set(multiprocessing.active_children())
    await until(lambda: bool(set(multiprocessing.active_children()) - before), within_s=120)
    (core,) = set(multiprocessing.active_children()) - before
    await asyncio.sleep(0.1)
    await engine.close()
    with pytest.raises(EngineFailedError, match="closed while it started"):
        await starting
    assert core.pid is not None
    assert not psutil.pid_exists(core.pid)
