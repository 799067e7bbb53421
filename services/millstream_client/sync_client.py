"""The client for code without asyncio: `Client`, run in a background thread."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import grpc

from millstream.v1 import chat_pb2, processor_pb2_grpc
from millstream_client.background import Background
from millstream_client.client import Client
from millstream_client.conversation import Conversation
from millstream_client.errors import RequestCancelledError
from millstream_client.request import Retry
from millstream_client.sync_streams import SyncAnswerStream, SyncMediaStream
from millstream_client.transport import Metadata, Options, Tls

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
Inner = TypeVar("Inner")


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
    render = _forward(Client.render, Background.run)
    parse = _forward(Client.parse, Background.run)
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
