"""`Launcher` and the fork server: what is forked is a process as any other, and none is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from millstream_server.cli.suite.launching import Launcher, Process
from tests.support.processes.command_line import until

_HERE = "tests.unit.forking"


@dataclass
class Started:
    """A process that tells facts of itself."""

    process: Process
    log: Path

    async def facts(self) -> dict[str, Any]:
        await until(lambda: "\n" in self.log.read_text())
        told: dict[str, Any] = json.loads(self.log.read_text())
        return told


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    with Launcher(tmp_path) as launcher:
        yield launcher


async def start(
    launcher: Launcher, tmp_path: Path, preload: str, *arguments: str, name: str = "log"
) -> Started:
    log = tmp_path / name
    with log.open("wb") as output:
        command = [sys.executable, "-m", f"{_HERE}.told", *arguments]
        named = f"{_HERE}.preloads:{preload}"
        return Started(await launcher.start(named, command, dict(os.environ), output), log)


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("preload", ["GOOD", "NESTED"])
async def test_a_forked_process_and_what_it_spawns_have_all_imported(
    launcher: Launcher, tmp_path: Path, preload: str
) -> None:
    started = await start(launcher, tmp_path, preload)
    told = await started.facts()
    own, child = told["own"], told["child"]
    assert own["pid"] == own["session"] == child["session"] == started.process.pid
    assert own["imported"]
    assert child["imported"]
    assert own["environment"] == {"TOLD_HOOK": "service", "TOLD_LATE": "set before the spawn"}
    assert child["environment"] == {"TOLD_HOOK": "spawned", "TOLD_LATE": "set before the spawn"}
    assert told["grandchild"]["imported"] == (preload == "NESTED")
    assert await started.process.wait() == started.process.returncode == 7


async def test_one_server_forks_all_and_is_replaced_when_it_was_killed(
    launcher: Launcher, tmp_path: Path
) -> None:
    one, other = [await start(launcher, tmp_path, "GOOD", "stay", name=n) for n in ("a", "b")]
    server = (await one.facts())["own"]["parent"]
    assert (await other.facts())["own"]["parent"] == server
    other.process.terminate()
    assert await other.process.wait() == -signal.SIGTERM
    os.kill(server, signal.SIGKILL)
    assert await one.process.wait() == -signal.SIGKILL
    await until(lambda: gone(one.process.pid))
    again = await start(launcher, tmp_path, "GOOD", "stay")
    assert (await again.facts())["own"]["parent"] not in (server, os.getpid())


@pytest.mark.parametrize("preload", ["UNKNOWN", "THREADED", "NO_SUCH_PRELOAD"])
async def test_where_the_imports_fail_a_process_gets_an_interpreter(
    launcher: Launcher, tmp_path: Path, preload: str
) -> None:
    started = await start(launcher, tmp_path, preload)
    own = (await started.facts())["own"]
    assert own["parent"] == os.getpid()
    assert not own["imported"]
    assert await started.process.wait() == 7
    assert "Error" in (tmp_path / "imports.log").read_text()


async def test_the_end_of_the_launcher_ends_what_it_forked(tmp_path: Path) -> None:
    with Launcher(tmp_path) as launcher:
        started = await start(launcher, tmp_path, "GOOD", "stay")
        told = await started.facts()
    assert await started.process.wait() == -signal.SIGKILL
    for process in (told["own"]["parent"], told["own"]["pid"]):
        await until(lambda process=process: gone(process))  # type: ignore[misc]


async def test_a_start_that_is_cancelled_while_the_server_imports_leaves_nothing(
    tmp_path: Path,
) -> None:
    began_s = time.monotonic()
    with Launcher(tmp_path) as launcher:
        starting = asyncio.create_task(start(launcher, tmp_path, "SLOW"))
        await asyncio.sleep(0)
        (server,) = psutil.Process().children()
        starting.cancel()
        await asyncio.wait([starting])
    assert not server.is_running()
    assert time.monotonic() - began_s < 10
    assert (tmp_path / "log").read_bytes() == b""
