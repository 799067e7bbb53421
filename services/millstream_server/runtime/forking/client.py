"""Starts a fork server and gives it jobs."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import IO

Stream = IO[bytes] | int
JOB_BYTES = 1 << 18
_SERVER = "millstream_server.runtime.forking.server"
_END_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Job:
    """What `python -m` is told, and where."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    folder: str


def send(address: str, job: Job, streams: Sequence[Stream]) -> int:
    """Send a job, with its stdin, stdout and stderr, to the server at an abstract ``address``.

    Returns a pipe that gets the process's id as a line once it is forked, and its exit code as
    another; negative for a signal.

    Raises:
        ConnectionRefusedError: there is no server.
    """
    files = [stream if isinstance(stream, int) else stream.fileno() for stream in streams]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect("\0" + address)
        status, theirs = os.pipe()
        try:
            socket.send_fds(server, [json.dumps(asdict(job)).encode()], [*files, theirs])
        finally:
            os.close(theirs)
    return status


def new_address() -> str:
    """Return an address that no server has."""
    return f"millstream-fork-{secrets.token_hex(8)}"


class ForkServer:
    """`runtime.forking.server` in its process, from the side of who started it."""

    def __init__(
        self,
        preload: str,
        *,
        address: str = "",
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
        errors: Stream | None = None,
    ) -> None:
        """Start it; it imports what ``preload`` names, and jobs wait for that.

        ``environment``, by default this process's, holds also while it imports.
        """
        self._life, theirs = socket.socketpair()
        self.address = address or new_address()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("\0" + self.address)
            listener.listen()
            descriptors = (listener.fileno(), theirs.fileno())
            self.process = subprocess.Popen(  # noqa: S603 - a module of ours
                [python, "-m", _SERVER, preload, *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL if errors is None else errors,
                stderr=errors,
                # A pool of threads would not survive the forks.
                env={**(environment or os.environ), "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=descriptors,
                start_new_session=True,
            )

    def fork(self, job: Job, output: Stream) -> int:
        """Start a process without input (`send`)."""
        with open(os.devnull, "rb") as nothing:  # noqa: PTH123 - no path of a file
            return send(self.address, job, (nothing, output, output))

    def kill(self) -> None:
        """End it at once, even while it imports, and every process that it forked."""
        self.process.kill()
        self.end()

    def end(self) -> None:
        """End it, and kill every process that it forked and that still runs."""
        self._life.close()
        try:
            self.process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
