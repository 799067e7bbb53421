"""A streamed answer, for code without asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Generator, Iterator
from typing import Any, Self

from millstream.v1 import diffusion_pb2, processor_pb2
from millstream_client.answers import Answer
from millstream_client.background import Background
from millstream_client.errors import MillstreamError
from millstream_client.generated_media import GeneratedMedia, MediaStream
from millstream_client.request import client_closed
from millstream_client.streams import AnswerStream, ReadStream

_READ_AHEAD = 64
"""Most messages of a stream that are read ahead."""


class SyncAnswerStream(Iterator[processor_pb2.ChoiceDelta]):
    """Iterate it for new output of each choice, or call `answer` for the whole.

    Nothing is sent before that. To end the call early:
    ``with``, `close`, Ctrl-C while it waits, or dropping the last reference.
    """

    def __init__(self, stream: AnswerStream, background: Background) -> None:
        """Wrap a stream, which is read in the background thread."""
        self._stream = stream
        self._background = background
        self._answer = Answer()
        self._deltas = _deltas(stream, background, self._answer)

    @property
    def result(self) -> Answer:
        """The answer so far."""
        return self._answer

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._stream.request_id

    def __next__(self) -> processor_pb2.ChoiceDelta:
        """Wait for new output of a choice.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        return next(self._deltas)

    def answer(self) -> Answer:
        """Read to the end; return the whole answer.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        for _ in self._deltas:
            pass
        return self._answer

    def cancel(self) -> None:
        """End the call while another thread reads; the reader gets a RequestCancelledError."""
        self._background.call(self._stream.cancel)

    def close(self) -> None:
        """End the call; no thread may be reading."""
        self._deltas.close()

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the call if it still runs."""
        self.close()


class SyncMediaStream(Iterator[diffusion_pb2.DiffusionProgress]):
    """Iterate it for progress, or call `result` for the files.

    Nothing is sent before that. To end the call early:
    ``with``, `close`, Ctrl-C while it waits, or dropping the last reference.
    """

    def __init__(self, stream: MediaStream, background: Background) -> None:
        """Wrap a stream, which is read in the background thread."""
        self._stream = stream
        self._background = background
        self._progress = _progress(stream, background)

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._stream.request_id

    @property
    def media(self) -> GeneratedMedia:
        """The result; `GeneratedMedia.complete` says whether it is there."""
        return self._stream.media

    def __next__(self) -> diffusion_pb2.DiffusionProgress:
        """Wait for the next progress.

        Raises:
            MillstreamError: the request failed.
        """
        return next(self._progress)

    def result(self) -> GeneratedMedia:
        """Read to the end; return the files.

        Raises:
            MillstreamError: the request failed.
        """
        for _ in self._progress:
            pass
        return self._stream.media

    def cancel(self) -> None:
        """End the call while another thread reads; the reader gets a RequestCancelledError."""
        self._background.call(self._stream.cancel)

    def close(self) -> None:
        """End the call; no thread may be reading."""
        self._progress.close()

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the call if it still runs."""
        self.close()


def _progress(
    stream: MediaStream, background: Background
) -> Generator[diffusion_pb2.DiffusionProgress, None, None]:
    with contextlib.closing(read_ahead(stream, background)) as messages:
        for message in messages:
            yield from message.progress


def _deltas(
    stream: AnswerStream, background: Background, answer: Answer
) -> Generator[processor_pb2.ChoiceDelta, None, None]:
    """Yield an answer's deltas; collect them in ``answer``."""
    try:
        with contextlib.closing(read_ahead(stream, background)) as messages:
            for message in messages:
                answer.add(message)
                yield from message.choices
    except MillstreamError as error:
        error.request_id = stream.request_id
        error.partial = answer if answer.begun else None
        raise


def read_ahead(stream: ReadStream, background: Background) -> Generator[Any, None, None]:
    """Read a stream in the background, ahead of the calling thread up to a limit."""
    messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reading = None
    try:
        while True:
            reading = background.submit(_read(stream, messages, background.leaving))
            for _ in range(_READ_AHEAD):
                message = messages.get()
                if message is None:
                    reading = None
                    return
                if isinstance(message, Exception):
                    reading = None
                    raise message
                yield message
    finally:
        if reading is not None:
            background.call(lambda: background.leave(stream, reading))


async def _read(
    stream: ReadStream, messages: queue.SimpleQueue[Any], leaving: set[asyncio.Task[None]]
) -> None:
    """Put messages into the queue, up to the limit; at the end None or the error."""
    try:
        if leaving:
            await asyncio.wait(leaving)
        for _ in range(_READ_AHEAD):
            message = await stream.read()
            messages.put(message)
            if message is None:
                return
    except asyncio.CancelledError:  # the loop ends
        messages.put(client_closed())
        raise
    except Exception as error:  # noqa: BLE001 - the reader raises it
        messages.put(error)
