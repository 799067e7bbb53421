"""A process that imports once and then forks one process a job, in milliseconds.

`python -m millstream_server.runtime.forking.server PRELOAD LISTENER LIFE`; `ForkServer` starts it
and sends the jobs. PRELOAD is what it imports (`preload.find`). LISTENER is the number of an open
SOCK_SEQPACKET socket: each connection brings one message, a job as JSON, with four file
descriptors: stdin, stdout, stderr, and the pipe that gets the process's id and later its exit code.
When the other end of LIFE closes, all that still runs is killed.

A forked process runs its module as `python -m` would, with the environment, folder, session and
streams that the job names. What differs: all is imported already, and its parent is the server.
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import warnings
from dataclasses import dataclass, field

from millstream_server.runtime.forking.client import JOB_BYTES, Job
from millstream_server.runtime.forking.linux import (
    OwnUsersSocket,
    adopt_orphans,
    end_with_parent,
    show_as,
)
from millstream_server.runtime.forking.preload import Preload, find
from millstream_server.runtime.forking.spawning import fork_instead_of_spawning


@dataclass
class _Server:
    """The loop of the server: forks, and tells exit codes."""

    listener: socket.socket
    life: socket.socket
    children: dict[int, int] = field(default_factory=dict)
    """Open pipes by process id."""

    def until_forked(self) -> Job | None:
        """Fork per job; returns it in the new process, and None in the server at its end."""
        woken, wake = os.pipe()
        for end in (woken, wake):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        with selectors.DefaultSelector() as selector:
            for readable in (self.listener, self.life, woken):
                selector.register(readable, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self.life in ready:
                    self._kill_all()
                    return None
                if woken in ready:
                    os.read(woken, 4096)
                    self._reap()
                if self.listener in ready and (job := self._next()):
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for unused in (woken, wake):
                        os.close(unused)
                    return job

    def _next(self) -> Job | None:
        """Fork for the next job; returns it in the new process, which has its streams only."""
        try:
            client, _ = self.listener.accept()
        except ConnectionAbortedError:  # another user's process
            return None
        with client:
            message, pipes, _, _ = socket.recv_fds(client, JOB_BYTES, 4)
        if len(pipes) != 4:  # noqa: PLR2004 - the client ended before it sent
            return None
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            end_with_parent(server)
            os.setsid()  # before anybody can know the id and kill its group
            os.write(pipes[3], f"{os.getpid()}\n".encode())
            self.listener.close()
            self.life.close()
            for stream, pipe in enumerate(pipes[:3]):
                os.dup2(pipe, stream)
            for pipe in (*pipes, *self.children.values()):
                os.close(pipe)
            return Job(**json.loads(message))
        *streams, status = pipes
        for pipe in streams:
            os.close(pipe)
        self.children[pid] = status
        return None

    def _reap(self) -> None:
        """Tell the exit codes of the ended; grandchildren whose parent died end here, too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                pipe = self.children.pop(pid, None)
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):
                        os.write(pipe, f"{os.waitstatus_to_exitcode(status)}\n".encode())
                    os.close(pipe)

    def _kill_all(self) -> None:
        for pid in self.children:
            for kill in (os.killpg, os.kill):  # it may have no group yet
                with contextlib.suppress(ProcessLookupError):
                    kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)


def _run(job: Job, preload: Preload) -> None:
    """Become what ``job`` asks for."""
    os.chdir(job.folder)
    os.environ.clear()
    os.environ.update(job.environment)
    if "PYTHONWARNINGS" in job.environment:
        warnings._processoptions(job.environment["PYTHONWARNINGS"].split(","))  # type: ignore[attr-defined]  # noqa: SLF001
    show_as(" ".join(["python", "-m", job.module, *job.arguments]))
    preload.in_service()
    if preload.in_spawned is not None:
        fork_instead_of_spawning(preload.in_spawned)
    if os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.argv = [job.module, *job.arguments]
    runpy.run_module(job.module, run_name="__main__", alter_sys=True)


def main() -> None:
    """Serve; a forked process leaves the loop here and runs its job as any main module."""
    name, listener, life = sys.argv[1:]
    adopt_orphans()
    preload = find(name)
    preload.load()
    server = _Server(OwnUsersSocket(fileno=int(listener)), socket.socket(fileno=int(life)))
    job = server.until_forked()
    if job is not None:
        _run(job, preload)


if __name__ == "__main__":
    main()
