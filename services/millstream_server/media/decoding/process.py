"""A decoder process, seen from the service: started when needed, sent a file, killed."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from millstream_server.media.decoding.wire import (
    READY,
    RESPONSE_BYTES,
    Outcome,
    Request,
    Response,
    unpack_indices,
)
from millstream_server.media.frames import Frames
from millstream_server.media.limits import MediaLimits
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_CHILD = "millstream_server.media.decoding.child"
_START_TIMEOUT_S = 30.0
# What an interpreter may need to start. All else stays here: keys, tokens, certificates' paths.
_ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")


class Decoder:
    """At most one process, which decodes one file at a time.

    All block: call them in threads. `decode` runs in one thread at a time; `kill` may be called
    from another one meanwhile, and ends it.
    """

    def __init__(self, limits: MediaLimits) -> None:
        """Start nothing yet."""
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._killed = False

    @property
    def pid(self) -> int | None:
        """The running process's id."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else None

    def ready(self) -> None:
        """Start a process unless one runs.

        Raises:
            UnavailableError: it doesn't start.
        """
        if self.pid is not None:
            return
        self._reap()
        self._start()
        try:
            link = self._connected()
            link.settimeout(_START_TIMEOUT_S)
            if link.recv(len(READY)) != READY:
                raise ConnectionResetError
            link.settimeout(None)
        except OSError as error:
            self._reap()
            if not self._killed:  # else its file was cancelled meanwhile
                log.error("decoder process did not start", error=error)
            raise UnavailableError("the decoder of images and videos did not start") from error

    def decode(self, data: bytes | memoryview, request: Request) -> Frames:
        """Let the process decode a file; a failure of the process ends it.

        Raises:
            InvalidRequestError: the file is refused, or the process crashed on it.
            UnavailableError: the process was killed.
            InternalError: the decoder failed, and not because of the file.
        """
        try:
            link = self._connected()
            link.sendall(request.pack())
            link.sendall(data)
            response = Response.unpack(bytes(_receive(link, RESPONSE_BYTES)), request)
            indices = unpack_indices(bytes(_receive(link, 4 * response.count)))
            body = _receive(link, response.nbytes)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if response.outcome is Outcome.DECODED:
            return Frames(
                modality=request.modality,
                width=response.width,
                height=response.height,
                data=body.toreadonly(),
                count=response.count,
                fps=response.fps,
                total_frames=response.total_frames,
                indices=indices,
            )
        raise self._failure(response.outcome, bytes(body).decode(errors="replace"))

    def kill(self) -> None:
        """End the process now; a `decode` that runs in another thread fails."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        """End the process, and wait for that."""
        self.kill()
        self._reap()

    # ---- one process ----

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-B", "-P", "-m", _CHILD, str(os.getpid())]
        command += [str(self._limits.decode_memory_bytes)]
        with theirs, self._lock:
            self._killed = False
            self._link = ours
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # vendors' texts quote the file
                env=dict(_environment()),
                start_new_session=True,
            )

    def _connected(self) -> socket.socket:
        if self._link is None:
            raise ConnectionResetError
        return self._link

    def _reap(self) -> int:
        """Kill the process if it runs; returns how it ended."""
        with self._lock:
            process, self._process = self._process, None
            link, self._link = self._link, None
        if link is not None:
            link.close()
        if process is None:
            return 0
        process.kill()
        return process.wait()

    # ---- failures ----

    def _lost(self, error: Exception) -> ServingError:
        """Clean up after a process that died or sent nonsense; returns the caller's error."""
        killed = self._killed
        process = self._process
        if process is not None and isinstance(error, OSError):
            # The socket closes a moment before the process has its exit status.
            process.wait()
        status = self._reap()
        log.warning("decoder process ended", status=status, killed=killed)
        if killed or status == -signal.SIGKILL:
            return UnavailableError("the decoder of images and videos was ended; send it again")
        if status == -signal.SIGXCPU:
            return InvalidRequestError.of("data", too_slow(self._limits))
        return InvalidRequestError.of(
            "data", "made the decoder crash: it may be damaged; save it anew and send that"
        )

    def _failure(self, outcome: Outcome, text: str) -> ServingError:
        if outcome is Outcome.REFUSED:
            return InvalidRequestError.of("data", text)
        if outcome is Outcome.OUT_OF_MEMORY:
            # What is left of a failed decode may take memory from the next one.
            self._reap()
            return InvalidRequestError.of("data", too_large(self._limits))
        failure = InternalError.with_id()
        log.error("decoder failed", error_id=failure.error_id, text=text)
        return failure


def too_slow(limits: MediaLimits) -> str:
    """Say that decoding took too long."""
    return (
        f"took longer than {limits.decode_timeout_s:g} s to be decoded, which is the most allowed: "
        "send a smaller one"
    )


def too_large(limits: MediaLimits) -> str:
    """Say that decoding takes too much memory."""
    return (
        f"needs more memory to be decoded than the {limits.decode_memory_bytes} bytes allowed: "
        "send a smaller one"
    )


def _environment() -> Iterator[tuple[str, str]]:
    for name in _ENVIRONMENT:
        if value := os.environ.get(name):
            yield name, value
    yield "PYTHONPATH", os.pathsep.join(filter(None, sys.path))
    yield "OPENBLAS_NUM_THREADS", "1"


def _receive(link: socket.socket, nbytes: int) -> memoryview:
    """Read exactly ``nbytes``.

    Raises:
        ConnectionResetError: the other side was closed before.
    """
    if nbytes == 0:
        return memoryview(b"")
    # A bytearray would be filled with zeros first, which holds up all threads.
    view, got = memoryview(mmap.mmap(-1, nbytes)), 0
    while got < nbytes:
        received = link.recv_into(view[got:])
        if not received:
            raise ConnectionResetError
        got += received
    return view
