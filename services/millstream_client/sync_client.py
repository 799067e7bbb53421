"""The client for code without asyncio: `Client`, run in a background thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc

from millstream.v1 import chat_pb2, diffusion_pb2, processor_pb2, processor_pb2_grpc
from millstream_client.answers import Answer
from millstream_client.background import Background
from millstream_client.client import Client
from millstream_client.conversation import Conversation
from millstream_client.errors import MillstreamError, RequestCancelledError
from millstream_client.request import Retry, client_closed
from millstream_client.results import GeneratedMedia
from millstream_client.streams import AnswerStream, MediaStream, MessageStream
from millstream_client.transport import Metadata, Options, Tls

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
Piece = TypeVar("Piece")
Inner = TypeVar("Inner")

_READ_AHEAD = 64
"""Most messages of a stream that are read ahead."""


class _SyncStream(Iterator[Piece]):
    """What streams have in common: pieces of the messages, and the ways to end the call."""

    def __init__(
        self, background: Background, stream: MessageStream[Piece], answer: Answer | None = None
    ) -> None:
        self._background = background
        self._stream = stream
        self._pieces = _pieces(background, stream, answer)

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
        self.result = Answer(answer_type=stream.result.answer_type)
        """The answer so far, without messages that were read ahead."""
        super().__init__(background, stream, self.result)

    def answer(self) -> Answer:
        """Read to the end; return the whole answer.

        Raises:
            MillstreamError: the request failed; its ``partial`` is the answer as far as it came.
        """
        self._read_to_the_end()
        return self.result


class SyncMediaStream(_SyncStream[diffusion_pb2.DiffusionProgress]):
    """Iterate it for progress, or call `result` for the files; as `SyncAnswerStream` otherwise."""

    def __init__(self, background: Background, stream: MediaStream) -> None:
        super().__init__(background, stream)
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


def read_ahead(stream: MessageStream[Any], background: Background) -> Generator[Any, None, None]:
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
    stream: MessageStream[Any], messages: queue.SimpleQueue[Any], leaving: set[asyncio.Task[None]]
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


class _Facade(Generic[Inner]):
    """An asyncio client or conversation, and the background thread that runs it."""

    def __init__(self, background: Background, inner: Inner) -> None:
        self._inner = inner
        self._background = background


def _forward(
    method: Callable[Concatenate[Inner, P], T], finish: Callable[[Background, T], U]
) -> Callable[Concatenate[_Facade[Inner], P], U]:
    """Make a method with the parameters of ``method``; ``finish`` converts its result."""

    @functools.wraps(method)
    def call(self: _Facade[Inner], /, *args: P.args, **named: P.kwargs) -> U:
        return finish(self._background, method(self._inner, *args, **named))

    return call


class SyncConversation(_Facade[Conversation]):
    """A conversation: turns, one at a time; other threads may call `cancel` and `abort`.

    See `Conversation`.
    """

    say = _forward(Conversation.say, SyncAnswerStream)
    tool_results = _forward(Conversation.tool_results, SyncAnswerStream)

    @property
    def messages(self) -> tuple[chat_pb2.ChatMessage, ...]:
        """The messages of all finished turns."""
        return self._inner.messages

    def cancel(self) -> None:
        """Cancel the running turn, which finishes with what was generated; keep the conversation.

        A turn that waits for a retry has nothing to finish: it fails with a RequestCancelledError.
        """
        with contextlib.suppress(RequestCancelledError):  # the client was closed
            self._background.submit(self._inner.cancel())

    def abort(self) -> None:
        """End the stream; the running turn fails with a RequestCancelledError."""
        self._background.call(self._inner.abort)

    def close(self) -> None:
        """Close the stream, or abort it if a turn is running."""
        with contextlib.suppress(RequestCancelledError):  # the client was closed
            self._background.run(self._inner.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SyncClient(_Facade[Client]):
    """Talks to a Millstream suite; `Client` does the same for asyncio.

    ``address`` is ``host:port``, a list of IP addresses ``ip1:port1,ip2:port2``, or a gRPC target
    such as ``dns:///name:port``. Thread-safe. Ctrl-C ends a waiting call.
    """

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        retry: Retry | None = None,
        options: Options | None = None,
    ) -> None:
        """Make a client; the first call connects.

        Raises:
            ValueError: the address is invalid, or an API key would be sent unencrypted.
            OSError: a TLS file can't be read.
        """
        client = Client(address, api_key=api_key, tls=tls, retry=retry, options=options)
        super().__init__(Background(client.connection), client)
        self._own_channel: tuple[grpc.Channel, Any] | None = None
        self._lock = threading.RLock()

    chat = _forward(Client.chat, SyncAnswerStream)
    complete = _forward(Client.complete, SyncAnswerStream)
    conversation = _forward(Client.conversation, SyncConversation)
    tokenize = _forward(Client.tokenize, Background.run)
    detokenize = _forward(Client.detokenize, Background.run)
    generate_image = _forward(Client.generate_image, SyncMediaStream)
    generate_video = _forward(Client.generate_video, SyncMediaStream)
    embed = _forward(Client.embed, Background.run)
    rerank = _forward(Client.rerank, Background.run)
    models = _forward(Client.models, Background.run)
    health = _forward(Client.health, Background.run)

    @property
    def channel(self) -> grpc.Channel:
        """A separate gRPC channel, for calls without a method here.

        Raises:
            RequestCancelledError: the client was closed.
        """
        return self._open()[0]

    @property
    def stub(self) -> Any:
        """The generated stub on `channel`; give its calls `metadata`.

        Raises:
            RequestCancelledError: the client was closed.
        """
        return self._open()[1]

    def _open(self) -> tuple[grpc.Channel, Any]:
        # Under a lock: making a stub on a closed channel crashes the process.
        with self._lock:
            self._inner.connection.check_open()
            if self._own_channel is None:
                channel = self._inner.connection.transport.open_sync()
                # The generated types are for asyncio only.
                stub: Any = processor_pb2_grpc.ProcessorServiceStub
                self._own_channel = channel, stub(channel)
            return self._own_channel

    def metadata(self) -> Metadata:
        """Return every call's metadata: the API key, and the current trace."""
        return self._inner.metadata()

    def close(self) -> None:
        """Disconnect; running and later calls fail with a RequestCancelledError."""
        self._background.close()
        with self._lock:
            if self._own_channel is not None:
                self._own_channel[0].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
