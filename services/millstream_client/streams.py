"""Streams of the server's messages: an answer's, and those of images and videos."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Any, ClassVar, Self, TypeVar

from millstream.v1 import diffusion_pb2, processor_pb2
from millstream_client.answers import Answer
from millstream_client.events import Event, EventReader
from millstream_client.request import Request
from millstream_client.results import GeneratedMedia
from millstream_client.tool_calls import ToolLimits
from millstream_client.tool_run import ToolRun

Piece = TypeVar("Piece")
_LIMITS = ToolLimits()


class MessageStream(AsyncIterator[Piece]):
    """What streams have in common: pieces of the messages, and the ways to end the call.

    Nothing is sent before the first read. To end the call early:
    ``async with``, `aclose`, cancelling the task that reads, or dropping the last reference.
    """

    field: ClassVar[str]
    """The messages' field with the pieces."""

    def __init__(self, request: Request, messages: AsyncGenerator[Any, None]) -> None:
        self._request = request
        self._messages = messages
        self._pieces: Iterator[Piece] = iter(())

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._request.request_id

    async def __anext__(self) -> Piece:
        """Wait for the next piece.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        while True:
            for piece in self._pieces:
                return piece
            self._pieces = iter(getattr(await anext(self._messages), self.field))

    async def read(self) -> Any:
        """Wait for the server's next message; return None at the end.

        Raises:
            MillstreamError: as iterating.
        """
        return await anext(self._messages, None)

    async def _read_to_the_end(self) -> None:
        self._pieces = iter(())
        while await self.read() is not None:
            pass

    def cancel(self) -> None:
        """End the call while another task reads; the reader gets a RequestCancelledError."""
        self._request.cancel()

    async def aclose(self) -> None:
        """End the call; no task may be reading."""
        self._pieces = iter(())
        await self._messages.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class AnswerStream(MessageStream[processor_pb2.ChoiceDelta]):
    """Iterate it for new output of each choice, or await `answer` for the whole.

    `events` tells reasoning, text and tool calls apart.
    """

    field = "choices"

    def __init__(
        self,
        request: Request,
        messages: AsyncGenerator[Any, None],
        run: Callable[[AnswerStream, ToolLimits], ToolRun] | None = None,
        answer_type: Any = None,
    ) -> None:
        """``run`` makes a run of tools in place of this stream; None: there can't be any.

        It doesn't keep the stream: dropping the last reference to that ends the call.
        """
        super().__init__(request, messages)
        self._run = run
        self.result.answer_type = answer_type

    @property
    def result(self) -> Answer:
        return self._request.answer

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the new output as events: the same as by iterating, in another form.

        Raises:
            MillstreamError: as iterating.
        """
        reader = EventReader(self.result)
        async for delta in self:
            for event in reader.read(delta):
                yield event

    def run_tools(self, limits: ToolLimits = _LIMITS) -> ToolRun:
        """Let the model call the functions among the tools until it answers; see `ToolRun`.

        Read the run in place of this stream. A ``timeout_s`` holds for each answer of it.

        Raises:
            TypeError: none of the tools is a function, or there are several choices.
            RuntimeError: this stream was read already.
        """
        if self._run is None:
            raise TypeError("only chats have tools")
        if self.result.begun:
            raise RuntimeError("this stream was read already: call run_tools before that")
        return self._run(self, limits)

    async def answer(self) -> Answer:
        """Read to the end; return the whole answer.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        await self._read_to_the_end()
        return self.result


class MediaStream(MessageStream[diffusion_pb2.DiffusionProgress]):
    """Iterate it for progress, or await `result` for the files."""

    field = "progress"

    def __init__(
        self, request: Request, media: GeneratedMedia, messages: AsyncGenerator[Any, None]
    ) -> None:
        super().__init__(request, messages)
        self.media = media
        """The result; `GeneratedMedia.complete` says whether it is there."""

    async def result(self) -> GeneratedMedia:
        """Read to the end; return the files.

        Raises:
            MillstreamError: the request failed.
        """
        await self._read_to_the_end()
        return self.media
