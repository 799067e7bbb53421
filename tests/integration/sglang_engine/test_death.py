"""An engine that dies, cannot start, or is closed too early."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from millstream_server.control.engine import Role
from millstream_server.runtime.errors import (
    EngineFailedError,
)
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    dies,
)

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]


@pytest.mark.parametrize("way", ["killed", "reports an exception"])
async def test_the_schedulers_death_is_noticed(model: Path, tmp_path: Path, way: str) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", model_path=str(model))
    await engine.ready()
    scheduler, _detokenizer = (await engine.inspect())["pids"]

    def kill() -> None:
        if way == "killed":
            os.kill(scheduler, signal.SIGKILL)
        else:  # what a scheduler sends its parent when it hits an exception
            os.kill(engine.pid, signal.SIGQUIT)

    await dies(engine, kill)
    assert not _alive(scheduler)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_an_engine_that_cannot_start_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", model_path=str(tmp_path / "no-model"))
    with pytest.raises(EngineFailedError) as caught:
        await engine.ready()
    assert str(tmp_path) not in caught.value.message
    assert await engine.close() == 0


async def test_an_unknown_engine_argument_is_named(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(
        tmp_path / "log", model_path=str(model), extra={"no_such_argument": 1}
    )
    with pytest.raises(EngineFailedError, match="no_such_argument"):
        await engine.ready()
    await engine.close()


async def test_closing_while_it_starts(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", close_after_s=0.3, model_path=str(model))
    with pytest.raises(EngineFailedError):
        await engine.ready()
    assert await engine.close() == 0


async def test_a_bootstrap_port_that_is_taken_is_refused(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        engine = await EngineProcess.launch(
            tmp_path / "log", model_path=str(model), role=Role.PREFILL, bootstrap_port=port
        )
        with pytest.raises(EngineFailedError, match=f"bootstrap_port: {port}"):
            await engine.ready()
        await engine.close()
