"""Decodes images and videos in child processes, so that no file can harm the service."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.decoding.wire import (
    READY,
    RESPONSE_BYTES,
    DecodingOutcome,
    DecodingRequest,
    DecodingResponse,
    unpack_indices,
)
from millstream_server.media.items import Frames, MediaLimits, Modality
from millstream_server.media.sniff import check_media
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
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._lock = threading.Lock()
        self._killed = False

    @property
    def pid(self) -> int | None:
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

    def decode(self, data: bytes | memoryview, request: DecodingRequest) -> Frames:
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
            response = DecodingResponse.unpack(bytes(_receive(link, RESPONSE_BYTES)), request)
            indices = unpack_indices(bytes(_receive(link, 4 * response.count)))
            body = _receive(link, response.nbytes)
        except (OSError, ValueError) as error:
            raise self._lost(error) from error
        if response.outcome is DecodingOutcome.DECODED:
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

    def _failure(self, outcome: DecodingOutcome, text: str) -> ServingError:
        if outcome is DecodingOutcome.REFUSED:
            return InvalidRequestError.of("data", text)
        if outcome is DecodingOutcome.OUT_OF_MEMORY:
            # What is left of a failed decode may take memory from the next one.
            self._reap()
            return InvalidRequestError.of(
                "data",
                f"needs more memory to be decoded than the {self._limits.decode_memory_bytes} "
                "bytes allowed: send a smaller one",
            )
        failure = InternalError.with_id()
        log.error("decoder failed", error_id=failure.error_id, text=text)
        return failure


def too_slow(limits: MediaLimits) -> str:
    """Say that decoding took too long."""
    return (
        f"took longer than {limits.decode_timeout_s:g} s to be decoded, which is the most allowed: "
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


T = TypeVar("T")


class DecoderPool:
    """A few decoder processes, started when needed and used again.

    `decode` may be called by many tasks at once; they wait for a free process in the order they
    came. Cancelling it kills its process, and a fresh one replaces it. What goes wrong with one
    file, also a crash, fails the call for that file only. Used in one event loop.
    """

    def __init__(
        self,
        limits: MediaLimits,
        processes: int = 2,
        sampling: FrameSampling = FrameSampling.LINSPACE,
    ) -> None:
        """Start nothing yet; ``sampling`` is the model's rule of which frames it sees."""
        self._limits = limits
        self._sampling = sampling
        self._decoders = tuple(Decoder(limits) for _ in range(processes))
        self._free: asyncio.Queue[Decoder] = asyncio.Queue()
        for decoder in self._decoders:
            self._free.put_nowait(decoder)
        # A thread per process, which the kernel kills at the end of the thread that started it.
        self._threads = ThreadPoolExecutor(processes, "decoder")
        self._closed = False

    async def decode(
        self,
        data: bytes | memoryview,
        modality: Modality,
        fit: tuple[int, int] | None = None,
    ) -> Frames:
        """Return a file's frames; ``data`` must not change meanwhile.

        An image is scaled to the width and height ``fit``: see `wire.DecodingRequest.fit`.

        Raises:
            InvalidRequestError: the file can't be accepted (field ``data``).
            UnavailableError: the process was ended by someone else, or the pool is closed.
        """
        self._check_open()
        request = self._check(data, modality, fit)
        decoder = await self._free.get()
        running = asyncio.ensure_future(self._run(decoder, data, request))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            decoder.kill()  # `running` frees it when the kernel has ended it
            # Else asyncio reports a failure that nobody waits for.
            running.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    async def close(self) -> None:
        """End the processes; calls in progress fail. May be called twice."""
        if self._closed:
            return
        self._closed = True
        for decoder in self._decoders:
            decoder.kill()
        for _ in self._decoders:
            decoder = await self._free.get()
            await self._in_thread(decoder.close)
        self._threads.shutdown()
        for decoder in self._decoders:  # for calls that still wait: they fail
            self._free.put_nowait(decoder)

    def _check(
        self, data: bytes | memoryview, modality: Modality, fit: tuple[int, int] | None
    ) -> DecodingRequest:
        limits, nbytes = self._limits, len(data)
        if nbytes > limits.max_item_bytes:
            sentence = f"has {nbytes} bytes; {limits.max_item_bytes} are allowed"
            raise InvalidRequestError.of("data", sentence)
        return DecodingRequest(
            media_format=check_media(data, modality),
            sampling=self._sampling,
            limits=limits,
            nbytes=nbytes,
            fit=fit,
        )

    async def _run(
        self, decoder: Decoder, data: bytes | memoryview, request: DecodingRequest
    ) -> Frames:
        """Decode, then free the decoder; nothing cancels this, so none is lost."""
        try:
            self._check_open()
            await self._in_thread(decoder.ready)
            self._check_open()
            decoding = self._in_thread(decoder.decode, data, request)
            await asyncio.wait([decoding], timeout=self._limits.decode_timeout_s)
            if decoding.done():
                return decoding.result()
            decoder.kill()
            await asyncio.wait([decoding])
            raise InvalidRequestError.of("data", too_slow(self._limits)) from decoding.exception()
        finally:
            self._free.put_nowait(decoder)

    def _check_open(self) -> None:
        if self._closed:
            raise UnavailableError("the decoder of images and videos is closed")

    def _in_thread(self, work: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)
