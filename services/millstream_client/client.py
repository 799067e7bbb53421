"""The client for tasks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc
from millstream_client import requests
from millstream_client.conversation import Conversation
from millstream_client.errors import DeadlineExceededError, UnavailableError
from millstream_client.handle import CallHandle, OpenCalls
from millstream_client.requests import Knobs, Say, generation_options
from millstream_client.retry import NO_RETRY, Attempts, Retry
from millstream_client.service_config import SERVICE
from millstream_client.streams import (
    AnswerStream,
    answer_deltas,
    before_next,
    cancels_task,
    one_shot,
)
from millstream_client.transport import Metadata, Options, Tls, plan_transport

if TYPE_CHECKING:
    from typing import Unpack


class Client:
    """Talks to a Millstream suite; `SyncClient` is the same for threads.

    ``address`` is ``host:port``, a list of IP addresses ``ip1:port1,ip2:port2``, or a gRPC target
    such as ``dns:///name:port``. Calls may run concurrently; use it within one event loop.
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
        """Prepare; the first call connects.

        Raises:
            ValueError: the address isn't one, or an API key would travel readably.
            OSError: a TLS file can't be read.
        """
        self.retry = retry or Retry()
        self._transport = plan_transport(address, api_key, tls, options or Options())
        self.calls = OpenCalls()
        """What runs; closing the client ends it."""
        self._channel: grpc.aio.Channel | None = None
        self._stub: processor_pb2_grpc.ProcessorServiceStub | None = None
        self._ask_method: Any = None

    @property
    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel, for calls that this client has no method for.

        Raises:
            RequestCancelledError: the client was closed.
        """
        self.calls.check_open()
        if self._channel is None:
            self._channel = self._transport.open_aio()
        return self._channel

    @property
    def stub(self) -> processor_pb2_grpc.ProcessorServiceStub:
        """The generated stub on `channel`; give its calls `metadata`.

        Raises:
            RequestCancelledError: the client was closed.
        """
        channel = self.channel
        if self._stub is None:
            self._stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        return self._stub

    def metadata(self) -> Metadata:
        """Give what every call carries: the API key, and the current trace."""
        return self._transport.metadata()

    async def close(self) -> None:
        """Disconnect; what runs, pauses or comes later fails with a RequestCancelledError."""
        self.calls.close()
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> Self:
        """Use it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        await self.close()

    def chat(
        self,
        messages: Say,
        *,
        system: str | None = None,
        model: str = "",
        tools: Sequence[chat_pb2.Tool] = (),
        request_id: str = "",
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> AnswerStream:
        """Ask one question, or for the next answer in a conversation."""
        start = requests.chat_start(
            messages,
            system_text=system,
            model=model,
            tools=tools,
            options=generation_options(**knobs),
            request_id=request_id,
        )

        request = processor_pb2.ChatRequest(start=start)
        return self._stream(lambda: self._ask, request, start.request_id, timeout_s)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> AnswerStream:
        """Continue a raw prompt, text or token ids: no chat template."""
        request = requests.complete_request(
            prompt, model=model, options=generation_options(**knobs), request_id=request_id
        )

        return self._stream(lambda: self.stub.Complete, request, request.request_id, timeout_s)

    def conversation(
        self,
        messages: Sequence[chat_pb2.Message] = (),
        *,
        system: str | None = None,
        model: str = "",
        tools: Sequence[chat_pb2.Tool] = (),
        request_id: str = "",
        **knobs: Unpack[Knobs],
    ) -> Conversation:
        """Prepare a conversation of several turns, after what was said before in ``messages``."""
        start = requests.chat_start(
            messages,
            system_text=system,
            model=model,
            tools=tools,
            options=generation_options(**knobs),
            request_id=request_id,
        )
        return Conversation(self, start)

    async def tokenize(
        self,
        text: Say,
        *,
        model: str = "",
        tools: Sequence[chat_pb2.Tool] = (),
        special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> processor_pb2.TokenizeResponse:
        """Turn text, or a conversation through the model's chat template, into token ids."""
        request = requests.tokenize_request(
            text, model=model, tools=tools, special_tokens=special_tokens
        )
        response: processor_pb2.TokenizeResponse = await self._call(
            lambda: self.stub.Tokenize, request, timeout_s
        )
        return response

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        special_tokens: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Turn token ids into text."""
        request = processor_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, include_special_tokens=special_tokens
        )
        response: processor_pb2.DetokenizeResponse = await self._call(
            lambda: self.stub.Detokenize, request, timeout_s
        )
        return response.text

    async def models(self, *, timeout_s: float | None = None) -> list[processor_pb2.Model]:
        """Tell which models are served."""
        response: processor_pb2.ListModelsResponse = await self._call(
            lambda: self.stub.ListModels, processor_pb2.ListModelsRequest(), timeout_s
        )
        return list(response.models)

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Tell whether a server is there and ready to answer."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = await self._call(
                lambda: health_pb2_grpc.HealthStub(self.channel).Check,
                request,
                timeout_s,
                NO_RETRY,
            )
        except (UnavailableError, DeadlineExceededError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def _ask(self) -> Any:
        """Chat for a single message, sent with the call itself.

        The same on the wire as a stream of one message. But grpc.aio loses a call's status when a
        message is written just as the server ends the call (grpc issue 36066).
        """
        if self._ask_method is None:
            self._ask_method = self.channel.unary_stream(*requests.ASK)
        return self._ask_method

    async def _ready(self) -> None:
        await self.channel.channel_ready()

    def _stream(
        self, method: Callable[[], Any], request: Any, request_id: str, timeout_s: float | None
    ) -> AnswerStream:
        handle = CallHandle(self.calls, Attempts(self.retry, timeout_s), request_id)

        def attempt(left_s: float | None) -> AsyncGenerator[Any, None]:
            return one_shot(self._begin(handle, method, request, left_s))

        return AnswerStream(answer_deltas(attempt, handle, self._ready), handle)

    async def _call(
        self,
        method: Callable[[], Any],
        request: Any,
        timeout_s: float | None,
        retry: Retry | None = None,
    ) -> Any:
        """Make a call with one answer, as often as it takes."""
        with CallHandle(self.calls, Attempts(retry or self.retry, timeout_s)) as handle:
            while True:
                try:
                    return await self._begin(handle, method, request, handle.attempts.timeout_s())
                except (grpc.RpcError, asyncio.CancelledError) as error:
                    if cancels_task(error):
                        raise
                    failed = handle.failure(error)
                    pause_s = handle.pause_s(failed)
                    if pause_s is None:
                        raise failed from failed.__cause__
                await before_next(failed, pause_s, handle, self._ready)

    def _begin(
        self, handle: CallHandle, method: Callable[[], Any], request: Any, left_s: float | None
    ) -> Any:
        """Send a request."""
        call = handle.begin(
            lambda: method()(
                request, timeout=left_s, metadata=self.metadata(), wait_for_ready=False
            )
        )
        handle.runs(call)
        return call
