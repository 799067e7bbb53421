"""Decodes images and videos in child processes, so that no file can harm the service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from millstream_server.media.decoding.process import Decoder, too_slow
from millstream_server.media.decoding.sampling import FrameSampling
from millstream_server.media.decoding.wire import Request
from millstream_server.media.frames import Frames
from millstream_server.media.items import Modality
from millstream_server.media.limits import MediaLimits
from millstream_server.media.sniff import check_media
from millstream_server.runtime.errors import InvalidRequestError, UnavailableError

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

        An image is scaled to the width and height ``fit``: see `wire.Request.fit`.

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
            running.add_done_callback(_take_exception)
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
    ) -> Request:
        limits, nbytes = self._limits, len(data)
        if nbytes > limits.max_item_bytes:
            sentence = f"has {nbytes} bytes; {limits.max_item_bytes} are allowed"
            raise InvalidRequestError.of("data", sentence)
        return Request(
            media_format=check_media(data, modality),
            sampling=self._sampling,
            limits=limits,
            nbytes=nbytes,
            fit=fit,
        )

    async def _run(self, decoder: Decoder, data: bytes | memoryview, request: Request) -> Frames:
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


def _take_exception(task: asyncio.Future[Frames]) -> None:
    """Keep asyncio from reporting a failure that nobody waits for."""
    if not task.cancelled():
        task.exception()
