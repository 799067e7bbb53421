"""A streamed answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any, Protocol, Self

from millstream.v1 import processor_pb2
from millstream_client.answers import Answer
from millstream_client.request import Request

Response = processor_pb2.ChatResponse | processor_pb2.CompleteResponse


class ReadStream(Protocol):
    """A stream of the server's messages, read one after another."""

    async def read(self) -> Any:
        """Wait for the server's next message; return None at the end."""
        ...

    def cancel(self) -> None:
        """End the call while another task reads."""
        ...

    async def aclose(self) -> None:
        """End the call; no task may be reading."""
        ...


class AnswerStream(AsyncIterator[processor_pb2.ChoiceDelta]):
    """Iterate it for new output of each choice, or await `answer` for the whole.

    Nothing is sent before that. To end the call early:
    ``async with``, `aclose`, cancelling the task that reads, or dropping the last reference.
    """

    def __init__(self, request: Request, messages: AsyncGenerator[Any, None]) -> None:
        """Wrap the messages of a request."""
        self._request = request
        self._messages = messages
        self._deltas: Iterator[processor_pb2.ChoiceDelta] = iter(())

    @property
    def result(self) -> Answer:
        """The answer so far."""
        return self._request.answer

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._request.request_id

    async def __anext__(self) -> processor_pb2.ChoiceDelta:
        """Wait for new output of a choice.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        while True:
            for delta in self._deltas:
                return delta
            self._deltas = iter((await anext(self._messages)).choices)

    async def answer(self) -> Answer:
        """Read to the end; return the whole answer.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        self._deltas = iter(())
        while await self.read() is not None:
            pass
        return self.result

    async def read(self) -> Response | None:
        """Wait for the server's next message; return None at the end.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        message: Response | None = await anext(self._messages, None)
        return message

    def cancel(self) -> None:
        """End the call while another task reads; the reader gets a RequestCancelledError."""
        self._request.cancel()

    async def aclose(self) -> None:
        """End the call; no task may be reading."""
        self._deltas = iter(())
        await self._messages.aclose()

    async def __aenter__(self) -> Self:
        """Return the stream."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """End the call if it still runs."""
        await self.aclose()
