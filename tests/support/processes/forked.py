"""Start processes by forking them from one that has imported what they need.

`start` gives a process of its own: own id, session, environment, log, signals and exit code. A
service on simulated engines starts in 50 ms instead of 2 s, one on SGLang or vLLM in 2 to 4 s
instead of 15.

Only what a pytest session starts is forked (`tests/conftest.py` calls `begin`). Elsewhere, and
where a job needs an interpreter of its own, a new one is started.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

from millstream_server.runtime.forking.client import ForkServer, Job, Stream, new_address, send

Kind = Literal["services", "sglang", "vllm"]
SUITE_PYTHON = Path(__file__).parents[3] / ".venv" / "bin" / "python"
"""That of `make setup`, which has SGLang; tests of vLLM run in another one."""
# Read when an interpreter or a library starts: too early for a process that is forked.
_READ_AT_START = ("PYTHONHASHSEED", "PYTHONDEVMODE", "PROMETHEUS_MULTIPROC_DIR")
_PRELOADS = "tests.support.processes.preloads"


class Process(Protocol):
    """What `subprocess.Popen` and a forked process have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...


class ForkedProcess:
    """A process whose parent is a `ForkServer`; used as a `subprocess.Popen`."""

    def __init__(self, status: int) -> None:
        """Read the id from ``status``; the exit code comes there later."""
        self._status = os.fdopen(status, "rb", buffering=0)
        self._lock = threading.Lock()
        self._code: int | None = None
        line = self._status.readline()
        if not line:
            raise RuntimeError("the fork server ended; it has written why to stderr")
        self.pid = int(line)

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self._code is None and self._readable(0):
                line = self._status.readline()
                self._code = int(line) if line else -signal.SIGKILL
                self._status.close()
            return self._code

    def _readable(self, timeout_s: float | None) -> bool:
        return bool(select.select([self._status], [], [], timeout_s)[0])

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if self._code is None:
            with contextlib.suppress(ValueError):  # closed: another thread has read the code
                self._readable(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)


_servers: dict[Kind, ForkServer] = {}
_announced: dict[Kind, str] = {}
"""Addresses of servers that this process will start."""


def announce(*kinds: Kind) -> None:
    """Tell children that start from now on where `begin` will start servers, if it does."""
    for kind in kinds:
        _announced[kind] = os.environ[_address_name(kind)] = new_address()


def fork_server(kind: Kind, address: str = "") -> ForkServer:
    """Start a server; it imports while the tests go on, and jobs wait for it."""
    # One thread: none of a pool may exist at the fork.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    preload = f"{_PRELOADS}:{kind.upper()}"
    return ForkServer(preload, address=address, python=_python(kind), environment=environment)


def begin(*kinds: Kind) -> None:
    """Start servers; processes of these kinds are forked from now on, here and in children.

    A kind that a parent has announced or begun is left to it.
    """
    for kind in kinds:
        if kind in _announced or not begun(kind):
            _servers[kind] = fork_server(kind, _announced.pop(kind, ""))
            os.environ[_address_name(kind)] = _servers[kind].address


def begun(kind: Kind) -> bool:
    """Tell whether processes of this kind are forked already, in a child of who began it too."""
    return _address_name(kind) in os.environ


def end() -> None:
    """End all servers that this process has begun."""
    while _servers:
        kind, server = _servers.popitem()
        del os.environ[_address_name(kind)]
        server.end()


def _python(kind: Kind) -> str:
    elsewhere = kind == "sglang" and importlib.util.find_spec("sglang") is None
    return str(SUITE_PYTHON) if elsewhere else sys.executable


def _address_name(kind: Kind) -> str:
    return f"TEST_FORK_{kind.upper()}"


def start(
    kind: Kind,
    module: str,
    arguments: Sequence[str],
    streams: tuple[Stream, Stream, Stream],
    environment: Mapping[str, str],
    *,
    interpreter: bool = False,
    folder: Path | None = None,
) -> Process:
    """Start ``module`` as `python -m` does, in a session of its own.

    ``streams`` are its stdin, stdout and stderr; it runs in ``folder``, by default in the current
    one. With ``interpreter`` it gets a new one, as when a user starts it.
    """
    address = os.environ.get(_address_name(kind))
    if address and not interpreter and not any(name in environment for name in _READ_AT_START):
        job = Job(module, list(arguments), dict(environment), str(folder or Path.cwd()))
        with contextlib.suppress(ConnectionRefusedError):  # announced, and not begun
            return ForkedProcess(send(address, job, streams))
    stdin, stdout, stderr = streams
    if module.startswith("tests."):  # it is found from any folder
        environment = {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        [_python(kind), "-m", module, *arguments],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def run(
    kind: Kind, module: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``module`` to its end and return what it printed; blocks."""
    with (
        open(os.devnull, "rb") as nothing,  # noqa: PTH123 - as the files beside it
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        environment = environment or {**os.environ, "OMP_NUM_THREADS": "1"}
        process = start(kind, module, arguments, (nothing, out, err), environment)
        code = process.wait()
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess([module, *arguments], code, *printed)
