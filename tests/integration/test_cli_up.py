"""`millstream up` over stand-in services: processes, signals, logs and ports are real."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import tests.support.processes.stand_in
from millstream_server.cli.suite.running import NoSuiteError, find_suite
from tests.support.processes.command_line import Terminal, until

_UP = (sys.executable, tests.support.processes.stand_in.__file__, "up")
_WAIT_S = 20.0


class Up:
    """A running `up` on pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.text = ""

    async def expect(self, text: str) -> None:
        """Read on until a line with ``text``."""
        assert self.process.stdout is not None
        async with asyncio.timeout(_WAIT_S):
            while line := (await self.process.stdout.readline()).decode():
                self.text += line
                if text in line:
                    return
        raise AssertionError(f"no {text!r} in {self.text}")

    async def ends(self) -> int:
        async with asyncio.timeout(_WAIT_S):
            out, _ = await self.process.communicate()
        self.text += out.decode()
        assert self.process.returncode is not None
        return self.process.returncode


@asynccontextmanager
async def running(log_dir: Path, flags: Mapping[str, Sequence[str]]) -> AsyncIterator[Up]:
    process = await asyncio.create_subprocess_exec(
        *_UP,
        str(log_dir),
        json.dumps(flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield Up(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def pids(text: str) -> dict[str, int]:
    """Read names and process ids from the table."""
    rows = re.findall(
        r"^(\S+-\d+|processor) +127\.0\.0\.1:\d+ +:\d+ +:\d+ +(\d+) ", text, re.MULTILINE
    )
    return {name: int(pid) for name, pid in rows}


def alive(pid: int) -> bool:
    """Tell whether a process runs; a zombie doesn't."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def gone(*processes: int) -> None:
    await until(lambda: not any(alive(pid) for pid in processes))


async def test_start_table_and_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_LOGLEVEL", "debug")
    weights = tmp_path / "decode-1.weights.json"  # noted in an earlier run
    weights.write_text("{}")
    slow = {"processor": ["--load-s", "2.5"], "prefill-1": ["--load-s", "2"]}  # a phase is seen
    async with running(tmp_path, slow) as up:
        await up.expect("Ctrl-C stops the suite")
        assert not weights.exists()
        unread = "MILLSTREAM_LOGLEVEL (did you mean MILLSTREAM_LOG_LEVEL?)"
        assert f"variables that no program reads: {unread}\n" in up.text
        assert "prefill-1: loading the model" in up.text
        assert re.search(r"Ready after \d+\.\d s", up.text)
        assert 'millstream chat "What is Millstream?"' in up.text
        assert "buf curl" in up.text
        assert re.search(r"In a browser: http://127\.0\.0\.1:\d+/\n", up.text)
        assert f"millstream top --log-dir {tmp_path}" in up.text
        assert f"millstream admin status --all --log-dir {tmp_path}" in up.text
        started = pids(up.text)
        ports = re.findall(r"^(\S+) +(127\.0\.0\.1:\d+) +:\d+ +:(\d+) ", up.text, re.MULTILINE)
        found = find_suite(tmp_path)
        assert [(one.name, one.address, one.admin) for one in found.services] == [
            (name, address, f"127.0.0.1:{admin}") for name, address, admin in ports
        ]
        assert [one.name for one in found.workers] == ["prefill-1", "decode-1"]
        assert (tmp_path / "admin-key").stat().st_mode & 0o777 == 0o600
        assert list(started) == ["prefill-1", "decode-1", "processor"]
        assert all(alive(pid) for pid in started.values())
        up.process.terminate()
        assert await up.ends() == 0
    digest = hashlib.sha256(found.admin_key.encode()).hexdigest()
    for name in started:
        assert f"operated by up:sha256:{digest}\n" in (tmp_path / f"{name}.log").read_text()
    assert not (tmp_path / "admin-key").exists()
    await gone(*started.values())
    with pytest.raises(NoSuiteError, match="no suite of `millstream up` has its logs in"):
        find_suite(tmp_path)
    assert up.text.index("waiting for the processor") < up.text.index("waiting for prefill-1")
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in started}
    assert all("drained" in log for log in logs.values())
    keys = {re.search(r"with key ([0-9a-f]{64})\n", log)[1] for log in logs.values()}  # type: ignore[index]
    assert len(keys) == 1


async def test_an_encode_worker_is_shown_while_it_loads_and_drained_with_the_workers(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, {"encode-1": ["--load-s", "0.8"]}) as up:
        await up.expect("Ctrl-C stops the suite")
        assert "encode-1: loading the model" in up.text
        assert list(pids(up.text)) == ["encode-1", "prefill-1", "decode-1", "processor"]
        assert "vision tower, stand-in" in up.text
        assert 'millstream chat "What is in this picture?" --image' in up.text
        assert "millstream.v1.EncodeService/Encode" in up.text
        up.process.terminate()
        assert await up.ends() == 0
    assert "waiting for encode-1, prefill-1, decode-1 to end" in up.text
    assert "drained" in (tmp_path / "encode-1.log").read_text()


async def test_workers_are_stopped_only_after_the_processor(tmp_path: Path) -> None:
    async with running(tmp_path, {"processor": ["--slow-drain", "1.0"]}) as up:
        await up.expect("Ctrl-C stops the suite")
        up.process.send_signal(signal.SIGINT)
        await up.expect("waiting for the processor")
        started = pids(up.text)
        await until(lambda: "draining" in (tmp_path / "processor.log").read_text())
        assert "draining" not in (tmp_path / "decode-1.log").read_text()
        assert alive(started["decode-1"])
        assert await up.ends() == 0


async def test_a_second_ctrl_c_kills(tmp_path: Path) -> None:
    async with running(tmp_path, {"processor": ["--slow-drain", "300"]}) as up:
        await up.expect("Ctrl-C stops the suite")
        started = pids(up.text)
        up.process.send_signal(signal.SIGINT)
        await up.expect("waiting for the processor")
        up.process.send_signal(signal.SIGINT)
        assert await up.ends() == 1
    assert "killing processor" in up.text
    await gone(*started.values())


async def test_a_failed_start_shows_why_and_stops_the_rest(tmp_path: Path) -> None:
    pid = str(tmp_path / "pid")
    flags = {"decode-1": ["--die-loading", pid], "prefill-1": ["--spawn", pid]}
    async with running(tmp_path, flags) as up:
        assert await up.ends() == 1
    assert "decode-1 exited with code 3 while it was loading the model" in up.text
    assert "the weights are of the wrong shape" in up.text
    assert str(tmp_path / "decode-1.log") in up.text
    assert "millstream doctor" in up.text
    await gone(int((tmp_path / "pid").read_text()))


async def test_ctrl_c_while_loading_stops(tmp_path: Path) -> None:
    async with running(tmp_path, {"decode-1": ["--load-s", "300"]}) as up:
        await up.expect("decode-1: loading the model")
        up.process.send_signal(signal.SIGINT)
        assert await up.ends() == 1
    assert "stopping before all services were ready" in up.text


async def test_a_service_that_dies_is_started_again(tmp_path: Path) -> None:
    async with running(tmp_path, {}) as up:
        await up.expect("Ctrl-C stops the suite")
        before = pids(up.text)
        os.kill(before["decode-1"], signal.SIGUSR1)
        await up.expect("decode-1 exited with code 9; starting it again in 1 s")
        await up.expect("the engine died")
        await up.expect("decode-1 serves again after")
        assert alive(before["prefill-1"])
        up.process.terminate()
        assert await up.ends() == 0


async def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    async with running(tmp_path, {}) as up:
        await up.expect("Ctrl-C stops the suite")
        started = pids(up.text)
        up.process.kill()
        await up.process.wait()
        await gone(*started.values())
    with pytest.raises(NoSuiteError, match="no suite of `millstream up` has its logs in"):
        find_suite(tmp_path)  # its file is still there


async def test_what_a_dead_service_spawned_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path, {"prefill-1": ["--spawn", str(tmp_path / "pid")]}) as up:
        await up.expect("Ctrl-C stops the suite")
        grandchild = int((tmp_path / "pid").read_text())
        os.kill(pids(up.text)["prefill-1"], signal.SIGKILL)
        await up.expect("killed by SIGKILL")
        await gone(grandchild)


async def test_two_suites_take_different_ports(tmp_path: Path) -> None:
    async with running(tmp_path / "a", {}) as first, running(tmp_path / "b", {}) as second:
        await first.expect("Ctrl-C stops the suite")
        await second.expect("Ctrl-C stops the suite")
        ports = [set(re.findall(r"127\.0\.0\.1:\d+", up.text)) for up in (first, second)]
        assert not ports[0] & ports[1]


async def test_on_a_terminal_ctrl_c_reaches_up_and_not_its_children(tmp_path: Path) -> None:
    arguments = ["up", str(tmp_path), '{"processor": ["--load-s", "1.0"]}']
    async with Terminal(arguments, "tests.support.processes.stand_in") as terminal:
        await terminal.expect("loading the model")
        await terminal.expect("Ctrl-C stops the suite")
        terminal.type("\x03")
        await terminal.expect("waiting for the processor")
        await terminal.expect("stopped")
        assert await terminal.ends() == 0
    assert "drained" in (tmp_path / "processor.log").read_text()
