"""When vLLM is known to be dead."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import EngineInfo
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.lifetime import VllmLifetime
from millstream_server.runtime.errors import EngineFailedError, ServingError


@pytest.fixture
def core() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a worker, which has inherited its end of a pipe."""
    command = ["sh", "-c", "sleep 60 & echo started; wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout
        assert process.stdout.readline() == b"started\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


async def test_a_core_that_ends_is_noticed_while_its_worker_still_runs(
    core: subprocess.Popen[bytes],
) -> None:
    """The core's end is told by a pipe that its worker has inherited: that one comes too late."""
    ended: list[str] = []
    failure: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()
    lifetime: VllmLifetime[EngineInfo] = VllmLifetime(
        VllmEngineConfig(model_path="none"), ended.append
    )
    built: Any = SimpleNamespace(core_pids=lambda: [core.pid])
    lifetime.started(built, cast("EngineInfo", None), failure.set_result)
    os.kill(core.pid, signal.SIGKILL)
    assert isinstance(await asyncio.wait_for(failure, 10), EngineFailedError)
    assert ended == ["The engine behind this worker died."]
    with pytest.raises(EngineFailedError):
        lifetime.ready()
    assert core.stdout
    assert not select.select([core.stdout], [], [], 0)[0], "the worker runs no more"
    await lifetime.close()
