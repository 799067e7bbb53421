"""A client's channel and the requests on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import grpc

from millstream.v1 import embedding_pb2, processor_pb2, processor_pb2_grpc
from millstream_client.generated_media import GeneratedMedia, MediaStream
from millstream_client.history import History, Turn
from millstream_client.request import Adapt, Request, client_closed
from millstream_client.retry import Retry
from millstream_client.service_config import DIFFUSION_SERVICE, EMBEDDING_SERVICE, SERVICE
from millstream_client.streams import AnswerStream
from millstream_client.transport import Metadata, Transport
from millstream_client.uploads import take_uploads
from millstream_client.vectors import CollectedVectors
from millstream_client.writing import half_close, write, write_uploads


class Connection:
    """Opens with the first request; accepts none after `close`."""

    def __init__(self, transport: Transport, retry: Retry) -> None:
        """Prepare."""
        self.transport = transport
        self.retry = retry
        self.running: set[Request] = set()
        self._closed = False
        self._channel: grpc.aio.Channel | None = None
        self._stub: processor_pb2_grpc.ProcessorServiceStub | None = None

    def check_open(self) -> None:
        """Check that the client wasn't closed.

        Raises:
            RequestCancelledError: it was.
        """
        if self._closed:
            raise client_closed()

    @property
    def channel(self) -> grpc.aio.Channel:
        """The channel of the running loop."""
        self.check_open()
        if self._channel is None:
            self._channel = self.transport.open_aio()
        return self._channel

    @property
    def stub(self) -> processor_pb2_grpc.ProcessorServiceStub:
        """The generated stub on `channel`."""
        channel = self.channel
        if self._stub is None:
            self._stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        return self._stub

    def chat_once(self) -> Any:
        """Return the method Chat as a call with a single message.

        The same on the wire as a stream of one message. But with a stream grpc.aio loses the status
        if the server ends the call while the message is written (grpc issue 36066).
        """
        return self.channel.unary_stream(
            f"/{SERVICE}/Chat",
            processor_pb2.ChatRequest.SerializeToString,
            processor_pb2.ChatResponse.FromString,
        )

    def metadata(self) -> Metadata:
        """Return every call's metadata."""
        return self.transport.metadata()

    async def ready(self) -> None:
        """Wait until a server is reached."""
        await self.channel.channel_ready()

    @contextlib.contextmanager
    def holding(self, request: Request) -> Iterator[None]:
        """Register a running request for `end_requests`; end it now if the client was closed."""
        self.running.add(request)
        if self._closed:
            request.end(client_closed())
        try:
            yield
        finally:
            self.running.discard(request)

    def end_requests(self) -> None:
        """End every running request, and every later one."""
        self._closed = True
        for request in self.running.copy():
            request.end(client_closed())

    async def close(self) -> None:
        """End every request, and disconnect."""
        self.end_requests()
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    def request(
        self, timeout_s: float | None, request_id: str = "", adapt: Adapt = lambda _: False
    ) -> Request:
        """Make a request; its time-out starts now."""
        return Request(self, self.retry, timeout_s, request_id, adapt)

    def stream(
        self, method: Callable[[], Any], message: Any, request_id: str, timeout_s: float | None
    ) -> AnswerStream:
        """Prepare a call with a response stream."""
        request = self.request(timeout_s, request_id)

        async def attempt() -> AsyncGenerator[Any, None]:
            call = self._begin(request, method, message)
            try:
                async for response in call:
                    request.answer.add(response)
                    yield response
            finally:
                call.cancel()

        return AnswerStream(request, request.messages(attempt))

    def chat(self, history: History, turn: Turn, timeout_s: float | None) -> AnswerStream:
        """Prepare a Chat of one turn."""
        request = self.request(timeout_s, history.request_id)

        async def attempt() -> AsyncGenerator[Any, None]:
            await history.read(turn)
            request.check_not_ended()
            message = history.start(turn)
            uploads = take_uploads(message)
            if uploads:
                call = self._begin(request, lambda: self.stub.Chat)
            else:
                call = self._begin(request, self.chat_once, message)
            try:
                # If the stream ends while they are sent, reading raises its error.
                if uploads and await write_uploads(call, uploads) and await write(call, message):
                    await half_close(call)
                async for response in call:
                    request.answer.add(response)
                    yield response
            finally:
                call.cancel()

        return AnswerStream(request, request.messages(attempt))

    def media(self, response: type[Any], message: Any, timeout_s: float | None) -> MediaStream:
        """Prepare a request for images or videos; ``response`` is the type of its messages."""
        method = response.__name__.removesuffix("Response")
        media = GeneratedMedia()
        request = Request(self, self.retry, timeout_s, message.start.request_id, collected=media)

        async def attempt() -> AsyncGenerator[Any, None]:
            rpc = f"/{DIFFUSION_SERVICE}/{method}"
            call = self._begin(request, lambda: self._one_message(rpc, response), message)
            try:
                async for part in call:
                    media.add(part)
                    yield part
            finally:
                call.cancel()

        return MediaStream(request, media, request.messages(attempt))

    async def embed(self, message: Any, timeout_s: float | None) -> CollectedVectors:
        """Send a batch of inputs, with retries; return its vectors."""
        found = CollectedVectors(len(message.start.inputs))
        request = Request(self, self.retry, timeout_s, message.start.request_id, collected=found)

        async def attempt() -> AsyncGenerator[Any, None]:
            rpc, response = f"/{EMBEDDING_SERVICE}/Embed", embedding_pb2.EmbedResponse
            call = self._begin(request, lambda: self._one_message(rpc, response), message)
            try:
                async for part in call:
                    found.add(part)
                    yield part
            finally:
                call.cancel()

        async for _ in request.messages(attempt):
            pass
        return found

    def _one_message(self, rpc: str, response: type[Any]) -> Any:
        """Return a method that takes a stream as a call with a single message; see `chat_once`."""
        return self.channel.unary_stream(
            rpc, lambda message: message.SerializeToString(), response.FromString
        )

    async def call(
        self,
        method: Callable[[], Any],
        message: Any,
        timeout_s: float | None,
        retry: Retry | None = None,
    ) -> Any:
        """Make a call with one response, with retries."""
        request = Request(self, retry or self.retry, timeout_s)

        async def attempt() -> AsyncGenerator[Any, None]:
            yield await self._begin(request, method, message)

        async with contextlib.aclosing(request.messages(attempt)) as responses:
            return await anext(responses)

    def _begin(self, request: Request, method: Callable[[], Any], message: Any = None) -> Any:
        """Start a call with a request's message; with a stream of them, give none."""
        call = method()(
            message, timeout=request.timeout_s(), metadata=self.metadata(), wait_for_ready=False
        )
        request.watch(call)
        return call
