from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

from millstream_server.cli.suite.launching import Launcher
from millstream_server.cli.suite.plan import PlannedService
from millstream_server.cli.suite.processes import TAIL_LINES, Child
from millstream_server.runtime.lifecycle.main import PORT_FAILED
from tests.support.processes.command_line import until

SERVICE = PlannedService(
    name="decode-1", role="decode", address="127.0.0.1:1", metrics_port=2, admin_port=3
)


def child(program: str, log: Path) -> Child:
    launch = partial(Launcher(log.parent).start, "")
    return Child(SERVICE, [sys.executable, "-u", "-c", program], dict(os.environ), log, launch)


async def test_the_last_phase_logged_counts(tmp_path: Path) -> None:
    program = (
        "at = '2026-11-20 10:00:00,000 INFO a.b:';"
        "print(at, 'phase phase=\"loading the model\" n=1'); print(at, 'phase phase=warming');"
        "print(at, 'worker connected name=\": phase phase=no\"'); print(' phase phase=no');"
        "print(at, 'phase phase=\"half a li', end='', flush=True);"
        "import time; time.sleep(60)"
    )
    loading = child(program, tmp_path / "log")
    await loading.start()
    assert loading.phase == "starting"
    await until(lambda: "half" in (tmp_path / "log").read_text())
    await loading.check()
    assert loading.phase == "warming"
    assert not loading.serving
    loading.kill()
    assert await loading.wait() == -9
    assert "SIGKILL" in loading.ending()


async def test_the_tail_and_the_exit_code(tmp_path: Path) -> None:
    failed = child("[print(i) for i in range(40)]; raise SystemExit(7)", tmp_path / "log")
    await failed.start()
    assert await failed.wait() == 7
    assert failed.tail() == [str(i) for i in range(40 - TAIL_LINES, 40)]
    assert failed.ending() == "exited with code 7"
    assert not failed.running


async def test_a_port_that_a_caller_ended_is_named(tmp_path: Path) -> None:
    failed = child(f"raise SystemExit({PORT_FAILED})", tmp_path / "log")
    await failed.start()
    assert await failed.wait() == 4
    assert failed.ending() == (
        "exited with code 4: a request that gRPC can't read, with a :path that isn't UTF-8, ended "
        "its port (docs/troubleshooting.md)"
    )


async def test_a_second_start_appends_and_looks_at_new_lines_only(tmp_path: Path) -> None:
    line = "2026-11-20 10:00:00,000 INFO a.b: phase phase=one"
    again = child(f"print({line!r})", tmp_path / "log")
    for _ in range(2):
        await again.start()
        await again.wait()
    assert (tmp_path / "log").read_text() == f"{line}\n" * 2
    await again.start()
    assert again.phase == "starting"
    await again.wait()
