"""Streams for code without asyncio: the background thread reads them ahead."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Generator, Iterator
from typing import Any, Self, TypeVar

from millstream.v1 import chat_pb2, diffusion_pb2, processor_pb2
from millstream_client.answers import Answer
from millstream_client.background import Background
from millstream_client.errors import MillstreamError
from millstream_client.events import Event, EventReader
from millstream_client.request import client_closed
from millstream_client.results import GeneratedMedia
from millstream_client.streams import AnswerStream, MediaStream, MessageStream
from millstream_client.tool_calls import ToolLimits
from millstream_client.tool_run import RunEvent, ToolRun

Piece = TypeVar("Piece")
Stream = MessageStream[Any] | ToolRun
"""What is read in the background: an answer's messages, or a run's events."""
_LIMITS = ToolLimits()
_READ_AHEAD = 64
"""Most messages of a stream that are read ahead."""


class _SyncStream(Iterator[Piece]):
    """What streams have in common: pieces of the messages, and the ways to end the call."""

    def __init__(
        self,
        background: Background,
        stream: Stream,
        pieces: Generator[Piece, None, None],
    ) -> None:
        self._background = background
        self._stream = stream
        self._pieces = pieces

    def _read_to_the_end(self) -> None:
        for _ in self._pieces:
            pass

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._stream.request_id

    def __next__(self) -> Piece:
        """Wait for the next piece.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        return next(self._pieces)

    def cancel(self) -> None:
        """End the call while another thread reads; the reader gets a RequestCancelledError."""
        self._background.call(self._stream.cancel)

    def close(self) -> None:
        """End the call; no thread may be reading."""
        self._pieces.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncAnswerStream(_SyncStream[processor_pb2.ChoiceDelta]):
    """Iterate it for new output of each choice, or call `answer` for the whole.

    Nothing is sent before that. To end the call early:
    ``with``, `close`, Ctrl-C while it waits, or dropping the last reference.
    """

    def __init__(self, background: Background, stream: AnswerStream) -> None:
        there = stream.result
        self.result = Answer(answer_type=there.answer_type, resumed_after=there.resumed_after)
        """The answer so far, without messages that were read ahead."""
        super().__init__(background, stream, _pieces(background, stream, self.result))
        self._begin_run = stream.run_tools

    def events(self) -> Iterator[Event]:
        """Yield the new output as events: the same as by iterating, in another form.

        Raises:
            MillstreamError: as iterating.
        """
        reader = EventReader(self.result)
        for delta in self:
            yield from reader.read(delta)

    def run_tools(self, limits: ToolLimits = _LIMITS) -> SyncToolRun:
        """Let the model call the functions among the tools until it answers; see `ToolRun`.

        Read the run in place of this stream. A ``timeout_s`` holds for each answer of it.

        Raises:
            TypeError: none of the tools is a function, or there are several choices.
            RuntimeError: this stream was read already.
        """
        return SyncToolRun(self._background, self._begin_run(limits))

    def answer(self) -> Answer:
        """Read to the end; return the whole answer.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        self._read_to_the_end()
        return self.result


class SyncToolRun(_SyncStream[RunEvent]):
    """`ToolRun` without asyncio: iterate it for events, or call `answer` for the last answer.

    Functions run in other threads than the caller's, coroutine functions in the client's own.
    """

    def __init__(self, background: Background, run: ToolRun) -> None:
        super().__init__(background, run, read_ahead(run, background))
        self._run = run

    @property
    def answers(self) -> list[Answer]:
        """The whole answers so far, those with calls among them."""
        return self._run.answers

    @property
    def messages(self) -> tuple[chat_pb2.ChatMessage, ...]:
        """The conversation so far: questions, answers, calls and their results."""
        return self._run.messages

    def answer(self) -> Answer:
        """Run to the end; return the last answer.

        Raises:
            MillstreamError: as `ToolRun`.
        """
        self._read_to_the_end()
        return self.answers[-1]


class SyncMediaStream(_SyncStream[diffusion_pb2.DiffusionProgress]):
    """Iterate it for progress, or call `result` for the files; as `SyncAnswerStream` otherwise."""

    def __init__(self, background: Background, stream: MediaStream) -> None:
        super().__init__(background, stream, _pieces(background, stream, None))
        self.media = stream.media
        """The result; `GeneratedMedia.complete` says whether it is there."""

    def result(self) -> GeneratedMedia:
        """Read to the end; return the files.

        Raises:
            MillstreamError: the request failed.
        """
        self._read_to_the_end()
        return self.media


def _pieces(
    background: Background, stream: MessageStream[Piece], answer: Answer | None
) -> Generator[Piece, None, None]:
    """Yield a stream's pieces; collect an answer.

    No method of the stream: dropping the last reference to that ends the call.
    """
    try:
        with contextlib.closing(read_ahead(stream, background)) as messages:
            for message in messages:
                if answer is not None:
                    answer.add(message)
                yield from getattr(message, stream.field)
    except MillstreamError as error:
        if answer is not None:
            error.request_id = stream.request_id
            error.partial = answer if answer.begun else None
        raise


def read_ahead(stream: Stream, background: Background) -> Generator[Any, None, None]:
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
    stream: Stream, messages: queue.SimpleQueue[Any], leaving: set[asyncio.Task[None]]
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
