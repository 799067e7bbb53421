"""One item on a stream: its number, its bytes, its deadline, its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from typing import Protocol

from millstream_server.media.file import MediaFile
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.lifecycle.drain import OpenWork
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.worker.encoding.core import LeasedItem
from millstream_server.worker.encoding.responses import ResponseBuilder
from millstream_server.worker.encoding.stages import Stages
from millstream_server.worker.encoding.upload import Upload
from millstream_server.worker.open_requests import OpenRequest

log = get_log(__name__)


class ItemRunner(Protocol):
    """What encodes a stream's items (`worker.encoding.core.EncodeWorker`)."""

    work: OpenWork
    """Counts open items and leases; knows whether the worker drains."""
    streams: OpenWork
    """Counts streams; a drain waits until those notified of it have ended."""
    upload_idle_s: float
    """Longest wait for the next bytes of a file."""

    def admit(self, file: MediaFile, total_bytes: int) -> OpenRequest:
        """Check and count an item.

        Raises:
            ServingError: it was refused.
        """
        ...

    async def encode(
        self, file: MediaFile, upload: Upload, owner: Hashable, stages: Stages
    ) -> LeasedItem:
        """Encode an admitted item; cancel it to stop.

        Raises:
            ServingError: it isn't encoded.
        """
        ...

    def release(self, lease: str) -> None:
        """End a lease."""
        ...

    def release_all(self, owner: Hashable) -> None:
        """End all leases of a stream."""
        ...


class ItemSlot:
    """A slot in use, from the start to its one terminal entry in a response."""

    def __init__(
        self,
        number: int,
        runner: ItemRunner,
        responses: ResponseBuilder,
        release: Callable[[int], None],
    ) -> None:
        """Write to ``responses``; ``release`` is called when slot ``number`` is free again."""
        self._number = number
        self._runner = runner
        self._responses = responses
        self._release = release
        self._task: asyncio.Task[LeasedItem] | None = None
        self._upload: Upload | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._stopped: ServingError | None = None
        self._abandoned = False

    def start(self, file: MediaFile, total_bytes: int, owner: Hashable) -> None:
        """Encode an item.

        Raises:
            ServingError: it was refused; the slot stays in use.
        """
        left_s = file.time_left_s
        if left_s is not None and left_s <= 0:
            raise DeadlinePassedError("the deadline passed before the item reached the worker")
        opened = self._runner.admit(file, total_bytes)
        upload = self._upload = Upload(
            total_bytes, file.data, self._want, self._runner.upload_idle_s
        )
        stages = Stages()
        self._task = asyncio.create_task(self._runner.encode(file, upload, owner, stages))
        self._task.add_done_callback(lambda task: self._ended(task, opened, stages))
        if left_s is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(left_s, self._on_deadline)

    def more(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._upload is not None:
            try:
                self._upload.more(data)
            except InvalidRequestError as error:
                self._stop(error)

    def cancel(self) -> None:
        """Stop the item; its end is reported as usual."""
        self._stop(RequestCancelledError("the caller cancelled the item"))

    def abandon(self) -> None:
        """Stop the item of a stream that has ended."""
        self._abandoned = True
        self.cancel()

    def fail(self, error: ServingError) -> None:
        """Report an item that was not started."""
        self._release(self._number)
        self._responses.fail(self._number, error)

    def _want(self) -> None:
        self._responses.want(self._number)

    def _on_deadline(self) -> None:
        self._stop(DeadlinePassedError("the deadline passed before the item was encoded"))

    def _stop(self, error: ServingError) -> None:
        if self._stopped is None and self._task is not None:
            self._stopped = error
            self._task.cancel()

    def _ended(self, task: asyncio.Task[LeasedItem], opened: OpenRequest, stages: Stages) -> None:
        """Report the end, once: the task has ended in whatever way."""
        opened.leave()
        self._upload = None  # which knows this slot: a cycle would keep the file's bytes
        if self._deadline is not None:
            self._deadline.cancel()
        error = self._error(task)
        if not self._abandoned:
            self._release(self._number)
            if error is None:
                self._responses.finish(self._number, task.result())
            else:
                self._responses.fail(self._number, error)
        if error is None:
            encoded = task.result().item
            opened.finished(
                "OK",
                {
                    **stages.attributes(),
                    "millstream.encode.tokens": encoded.tokens,
                    "millstream.encode.cached": encoded.cached,
                },
            )
        else:
            opened.failed(error)

    def _error(self, task: asyncio.Task[LeasedItem]) -> ServingError | None:
        if task.cancelled():
            return self._stopped or UnavailableError("the worker stopped before the item's end")
        error = task.exception()
        if error is None or isinstance(error, ServingError):
            return error
        internal = InternalError.with_id()
        log.error("an item failed", error_id=internal.error_id, error=error)
        return internal
