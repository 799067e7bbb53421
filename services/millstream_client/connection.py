"""A client's channel and the requests on it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2

from millstream.v1 import embedding_pb2, processor_pb2, processor_pb2_grpc
from millstream_client.answers import ParsedAnswer
from millstream_client.errors import DeadlineExceededError, UnavailableError
from millstream_client.going_on import can_go_on_with, go_on_with
from millstream_client.request import NO_RETRY, Request, Retry, client_closed
from millstream_client.results import CollectedVectors, Embeddings, GeneratedMedia
from millstream_client.service_config import DIFFUSION_SERVICE, EMBEDDING_SERVICE, SERVICE
from millstream_client.streams import AnswerStream, MediaStream
from millstream_client.transport import Metadata, Transport
from millstream_client.writing import Upload, half_close, take_input_image, write, write_uploads

Response = TypeVar("Response", bound=Message)
_serialize = methodcaller("SerializeToString")


class Connection:
    """Opens with the first request; accepts none after `close`."""

    def __init__(self, transport: Transport, retry: Retry) -> None:
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
        self.check_open()
        if self._channel is None:
            self._channel = self.transport.open_aio()
        return self._channel

    @property
    def stub(self) -> processor_pb2_grpc.ProcessorServiceStub:
        channel = self.channel
        if self._stub is None:
            self._stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        return self._stub

    def metadata(self) -> Metadata:
        return self.transport.metadata()

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
        self.end_requests()
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close(None)

    def complete(
        self, message: processor_pb2.CompleteRequest, timeout_s: float | None
    ) -> AnswerStream:
        def goes_on() -> bool:
            return can_go_on_with(message, request.answer)

        def rest() -> processor_pb2.CompleteRequest:
            sent = processor_pb2.CompleteRequest()
            sent.CopyFrom(message)
            if request.answer.begun:
                go_on_with(sent, request.answer)
            return sent

        request = Request(self, timeout_s, message.request_id, goes_on=goes_on)
        rpc, response = f"/{SERVICE}/Complete", processor_pb2.CompleteResponse
        messages = self._stream(request, request.answer, rpc, response, message, rest=rest)
        return AnswerStream(request, messages)

    async def parse(
        self, message: processor_pb2.ParseRequest, timeout_s: float | None
    ) -> ParsedAnswer:
        answer = ParsedAnswer(model=message.reading.model)
        request = Request(self, timeout_s, collected=answer)
        rpc, response = f"/{SERVICE}/Parse", processor_pb2.ParseResponse
        async for _ in self._stream(request, answer, rpc, response, message):
            pass
        return answer

    def media(self, response: type[Any], message: Any, timeout_s: float | None) -> MediaStream:
        """Prepare a request for images or videos; ``response`` is the type of its messages."""
        media = GeneratedMedia()
        request = Request(self, timeout_s, message.start.request_id, collected=media)
        rpc = f"/{DIFFUSION_SERVICE}/{response.__name__.removesuffix('Response')}"
        uploads = take_input_image(message)
        messages = self._stream(request, media, rpc, response, message, uploads=uploads)
        return MediaStream(request, media, messages)

    async def embed(self, messages: Iterable[Any], timeout_s: float | None) -> Embeddings:
        """Send batches of inputs one after another, each with retries; return all vectors."""
        result = Embeddings()
        for message in messages:
            found = CollectedVectors(len(message.start.inputs))
            request = Request(self, timeout_s, message.start.request_id, collected=found)
            rpc, response = f"/{EMBEDDING_SERVICE}/Embed", embedding_pb2.EmbedResponse
            async for _ in self._stream(request, found, rpc, response, message):
                pass
            result.vectors += [found.found[i] for i in range(found.count)]
            result.model, result.request_id = found.model, found.request_id
            result.input_tokens += found.input_tokens
        return result

    def _stream(
        self,
        request: Request,
        collected: Any,
        rpc: str,
        response: type[Any],
        message: Any,
        *,
        uploads: Sequence[Upload] = (),
        rest: Callable[[], Any] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yield the responses to a message, with retries, after ``collected`` has them.

        ``uploads`` are sent before it. ``rest`` makes what is sent in its place.
        """

        async def attempt() -> AsyncGenerator[Any, None]:
            if uploads:
                method = self.channel.stream_stream(rpc, _serialize, response.FromString)
                call = self.begin(request, method)
            else:
                sent = message if rest is None else rest()
                call = self.begin(request, self.with_one_message(rpc, response), sent)
            try:
                # If the stream ends while they are sent, reading raises its error.
                if uploads and await write_uploads(call, uploads, type(message)):
                    await write(call, message)
                    await half_close(call)
                async for part in call:
                    collected.add(part)
                    yield part
            finally:
                call.cancel()

        return request.messages(attempt)

    async def call(
        self,
        rpc: str,
        response: type[Response],
        message: Any,
        timeout_s: float | None,
        retry: Retry | None = None,
    ) -> Response:
        request = Request(self, timeout_s, retry=retry)

        async def attempt() -> AsyncGenerator[Response, None]:
            parse: Any = response
            method = self.channel.unary_unary(rpc, _serialize, parse.FromString)
            yield await self.begin(request, method, message)

        async with contextlib.aclosing(request.messages(attempt)) as responses:
            found: Response = await anext(responses)
            return found

    async def is_serving(self, timeout_s: float) -> bool:
        """Ask a server for its health, once; False if none is reached."""
        try:
            response = await self.call(
                "/grpc.health.v1.Health/Check",
                health_pb2.HealthCheckResponse,
                health_pb2.HealthCheckRequest(service=SERVICE),
                timeout_s,
                NO_RETRY,
            )
        except (UnavailableError, DeadlineExceededError):
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)

    def with_one_message(self, rpc: str, response: type[Any]) -> Any:
        """Return a method with a stream of requests as a call with a single message.

        The same on the wire as a stream of one message. But with a stream grpc.aio loses the status
        if the server ends the call while the message is written (grpc issue 36066).
        """
        return self.channel.unary_stream(rpc, _serialize, response.FromString)

    def begin(self, request: Request, method: Any, message: Any = None) -> Any:
        """Start a call with a request's message; with a stream of them, give none."""
        call = method(
            message, timeout=request.timeout_s(), metadata=self.metadata(), wait_for_ready=False
        )
        request.watch(call)
        return call
