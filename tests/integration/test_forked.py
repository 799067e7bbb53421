"""`processes.forked`: what it forks is a process as any other, and none is left behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream_server.runtime.forking.client import Job, Stream
from tests.support.processes import forked

_FOREVER = ("http.server", ["0", "--bind", "127.0.0.1"])


@contextmanager
def _streams(out: Path) -> Iterator[tuple[Stream, Stream, Stream]]:
    with Path(os.devnull).open("rb") as nothing, out.open("wb") as file:
        yield nothing, file, file


def test_it_has_an_id_a_session_and_signals_of_its_own(tmp_path: Path) -> None:
    with _streams(tmp_path / "log") as streams:
        process = forked.start("services", *_FOREVER, streams, dict(os.environ))
    assert os.getsid(process.pid) == process.pid
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == process.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()


def test_its_environment_and_its_output_are_those_it_was_given() -> None:
    environment = {**os.environ, "MILLSTREAM_DRAIN_S": "7.5"}
    done = forked.run(
        "services", "millstream_server.decode", "--print-config", environment=environment
    )
    assert done.returncode == 0, done.stderr
    assert "7.5" in done.stdout


def test_its_exit_code_is_known() -> None:
    done = forked.run("services", "millstream_server.decode", "--drain-s", "long")
    assert done.returncode == 2
    assert "--drain-s" in done.stderr


def test_the_server_takes_what_it_forked_with_it(tmp_path: Path) -> None:
    server = forked.fork_server("services")
    module, arguments = _FOREVER
    job = Job(module, arguments, dict(os.environ), str(tmp_path))
    with (tmp_path / "log").open("wb") as log:
        process = forked.ForkedProcess(server.fork(job, log))
    server.end()
    assert process.wait(10) == -signal.SIGKILL
    assert process.poll() == -signal.SIGKILL
    assert not Path(f"/proc/{process.pid}").exists()
