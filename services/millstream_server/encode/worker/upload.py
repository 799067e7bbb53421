"""The bytes of one item's file, as they come."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from millstream_server.runtime.errors import InvalidRequestError, UnavailableError
from millstream_server.runtime.rpc.ledger import Ledger
from millstream_server.runtime.telemetry import metrics

MAX_CHUNK_BYTES = 2 << 20


class ItemUpload:
    """A file that is here, or comes in chunks after `received` has asked for it."""

    def __init__(self, total_bytes: int, data: bytes | memoryview, idle_s: float) -> None:
        """Take ``data`` for the whole file; if it is empty, chunks must come within ``idle_s``."""
        self.total_bytes = total_bytes
        self.here = bool(data)
        """Whether the file came with the start."""
        self._data = memoryview(data)
        self._idle_s = idle_s
        self._wanted = False
        self._buffer = memoryview(b"")
        self._filled = 0
        self._came = asyncio.Event()

    def more(self, data: bytes) -> None:
        """Take the next chunk.

        Raises:
            InvalidRequestError: it breaks the rules; the item fails.
        """
        if not self._wanted:
            raise InvalidRequestError.of("data", "bytes came that the worker hadn't asked for")
        if not 0 < len(data) <= MAX_CHUNK_BYTES:
            sentence = f"a message has {len(data)} bytes of it; send 1 to {MAX_CHUNK_BYTES}"
            raise InvalidRequestError.of("data", sentence)
        end = self._filled + len(data)
        if end > self.total_bytes:
            sentence = f"is {self.total_bytes}, but at least {end} bytes came"
            raise InvalidRequestError.of("total_bytes", sentence)
        self._buffer[self._filled : end] = data
        self._filled = end
        self._came.set()

    async def received(self, want: Callable[[], None]) -> memoryview:
        """Return the whole file; ``want`` asks the caller for it, if it isn't here.

        Raises:
            UnavailableError: no chunk came for too long.
        """
        if self.here:
            return self._data
        self._wanted, self._buffer = True, memoryview(bytearray(self.total_bytes))
        want()
        while self._filled < self.total_bytes:
            self._came.clear()
            try:
                async with asyncio.timeout(self._idle_s):
                    await self._came.wait()
            except TimeoutError as error:
                raise UnavailableError(
                    f"only {self._filled} of {self.total_bytes} bytes came, and none for "
                    f"{self._idle_s:g} s; send the item again"
                ) from error
        return self._buffer.toreadonly()


class UploadBytes(Ledger):
    """The bytes of all files that are held at once."""

    def __init__(self, max_bytes: int) -> None:
        """Allow ``max_bytes``; one larger file may be held alone."""
        super().__init__(
            max_bytes,
            busy="the worker is busy: a file of {amount} bytes and the {used} bytes that it holds "
            "would exceed {most}; retry later",
        )

    @contextlib.contextmanager
    def hold(self, nbytes: int) -> Iterator[None]:
        """Hold a file during the ``with`` block.

        Raises:
            OverloadedError: others leave no room for it.
        """
        if self.used:
            self.take(nbytes)
        else:
            self.used = nbytes
        metrics.ENCODE_UPLOAD_BYTES.inc(nbytes)
        try:
            yield
        finally:
            self.give_back(nbytes)
            metrics.ENCODE_UPLOAD_BYTES.dec(nbytes)
