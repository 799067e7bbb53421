"""How a suite's processes are started: each with a Python of its own, or forked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

from millstream_server.cli.suite import lifeline
from millstream_server.runtime.forking.client import ForkServer, Job


class ForkedProcess:
    """A process whose parent is a fork server."""

    def __init__(self, status: int) -> None:
        """``status`` is the server's pipe (`forking.client.send`); it is closed at the end."""
        self.pid = 0
        """0 until `started`."""
        self.returncode: int | None = None
        self._lines = b""
        self._changed = asyncio.Event()
        self._status = status
        asyncio.get_running_loop().add_reader(status, self._read)

    def _read(self) -> None:
        got = os.read(self._status, 64)
        self._lines += got
        pid, _, code = self._lines.partition(b"\n")
        self.pid = int(pid or 0)
        if code.endswith(b"\n"):
            self._end(int(code))
        elif not got:  # the server was killed, and the kernel kills what it has forked
            self._end(-signal.SIGKILL)
        self._changed.set()

    def _end(self, code: int) -> None:
        self.returncode = code
        asyncio.get_running_loop().remove_reader(self._status)
        os.close(self._status)

    async def started(self) -> bool:
        """Wait until it is forked; return whether it was."""
        while not self.pid and self.returncode is None:
            await self._next_change()
        return self.pid > 0

    async def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        while self.returncode is None:
            await self._next_change()
        return self.returncode

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        if self.pid and self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)


Process = asyncio.subprocess.Process | ForkedProcess
"""A process that was started."""


class _Kind(NamedTuple):
    """What a fork server is for."""

    python: str
    preload: str


class Launcher:
    """Starts a suite's processes; a context manager, at whose end all that were forked are killed.

    For each kind of engine there is one server, which is started when it is first needed.
    """

    def __init__(self, log_dir: Path) -> None:
        """Servers write what they print while they import to a file in ``log_dir``."""
        self._log = log_dir / "imports.log"
        self._servers: dict[_Kind, ForkServer] = {}
        self._failed: set[_Kind] = set()

    def __enter__(self) -> Self:
        self._log.unlink(missing_ok=True)  # the last run's
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.kill()

    async def start(
        self, preload: str, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> Process:
        """Start ``command`` in a session of its own; it is killed when this process ends.

        ``command`` begins with the program's full path. With ``preload`` (`forking.preload.find`)
        it is PYTHON -m MODULE, and forked; only if the imports fail it gets an interpreter, and so
        says itself what fails.
        """
        kind = _Kind(command[0], preload)
        if preload and kind not in self._failed:
            forked = await self._fork(kind, command, env, output)
            if forked is not None:
                return forked
            self._failed.add(kind)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())),
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            start_new_session=True,
        )

    async def _fork(
        self, kind: _Kind, command: Sequence[str], env: Mapping[str, str], output: IO[bytes]
    ) -> Process | None:
        """Return None: the server has ended, before it forked."""
        _, _, module, *arguments = command
        job = Job(module, arguments, env, str(Path.cwd()))
        try:
            status = self._server(kind, env).fork(job, output)
        except OSError:
            return None
        forked = ForkedProcess(status)
        return forked if await forked.started() else None

    def _server(self, kind: _Kind, env: Mapping[str, str]) -> ForkServer:
        """Return a server that runs; one that was killed is replaced."""
        server = self._servers.get(kind)
        if server is None or server.process.poll() is not None:
            if server is not None:
                server.end()
            with self._log.open("ab") as log:
                server = self._servers[kind] = ForkServer(
                    kind.preload, python=kind.python, environment=env, errors=log
                )
        return server
