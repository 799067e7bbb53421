"""The client for threads; `client` without the awaiting."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import chat_pb2, processor_pb2, processor_pb2_grpc
from millstream_client import requests
from millstream_client.errors import DeadlineExceededError, UnavailableError
from millstream_client.handle import CallHandle, OpenCalls
from millstream_client.requests import Knobs, Say, generation_options
from millstream_client.retry import NO_RETRY, Attempts, Retry
from millstream_client.service_config import SERVICE
from millstream_client.sync_conversation import SyncConversation
from millstream_client.sync_streams import SyncAnswerStream, answer_deltas, before_next, one_shot
from millstream_client.transport import Metadata, Options, Tls, plan_transport

if TYPE_CHECKING:
    from typing import Unpack


class SyncClient:
    """Talks to a Millstream suite; `Client` is the same for tasks.

    ``address`` is ``host:port``, a list of IP addresses ``ip1:port1,ip2:port2``, or a gRPC target
    such as ``dns:///name:port``. Threads may share it.
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
        self._channel: grpc.Channel = self._transport.open_sync()
        # The generated types know tasks only; the same stub serves threads. Stubs are made here
        # alone: made on a closed channel, they bring grpcio 1.85 down with the process.
        stub: Any = processor_pb2_grpc.ProcessorServiceStub
        self._stub: Any = stub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)
        # The same on the wire as a stream of one message; it takes no thread to send it.
        self._ask = self._channel.unary_stream(*requests.ASK)

    @property
    def channel(self) -> grpc.Channel:
        """The gRPC channel, for calls that this client has no method for.

        Raises:
            RequestCancelledError: the client was closed.
        """
        self.calls.check_open()
        return self._channel

    @property
    def stub(self) -> Any:
        """The generated stub on `channel`; give its calls `metadata`.

        Raises:
            RequestCancelledError: the client was closed.
        """
        self.calls.check_open()
        return self._stub

    def metadata(self) -> Metadata:
        """Give what every call carries: the API key, and the current trace."""
        return self._transport.metadata()

    def close(self) -> None:
        """Disconnect; what runs, pauses or comes later fails with a RequestCancelledError."""
        self.calls.close()
        self._channel.close()

    def __enter__(self) -> Self:
        """Use it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Disconnect."""
        self.close()

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
    ) -> SyncAnswerStream:
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
        return self._stream(self._ask, request, start.request_id, timeout_s)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> SyncAnswerStream:
        """Continue a raw prompt, text or token ids: no chat template."""
        request = requests.complete_request(
            prompt, model=model, options=generation_options(**knobs), request_id=request_id
        )

        return self._stream(self._stub.Complete, request, request.request_id, timeout_s)

    def conversation(
        self,
        messages: Sequence[chat_pb2.Message] = (),
        *,
        system: str | None = None,
        model: str = "",
        tools: Sequence[chat_pb2.Tool] = (),
        request_id: str = "",
        **knobs: Unpack[Knobs],
    ) -> SyncConversation:
        """Prepare a conversation of several turns, after what was said before in ``messages``."""
        start = requests.chat_start(
            messages,
            system_text=system,
            model=model,
            tools=tools,
            options=generation_options(**knobs),
            request_id=request_id,
        )
        return SyncConversation(self, start)

    def tokenize(
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
        response: processor_pb2.TokenizeResponse = self._call(
            self._stub.Tokenize, request, timeout_s
        )
        return response

    def detokenize(
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
        response: processor_pb2.DetokenizeResponse = self._call(
            self._stub.Detokenize, request, timeout_s
        )
        return response.text

    def models(self, *, timeout_s: float | None = None) -> list[processor_pb2.Model]:
        """Tell which models are served."""
        response: processor_pb2.ListModelsResponse = self._call(
            self._stub.ListModels, processor_pb2.ListModelsRequest(), timeout_s
        )
        return list(response.models)

    def health(self, *, timeout_s: float = 5.0) -> bool:
        """Tell whether a server is there and ready to answer."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            answer = self._call(self._health.Check, request, timeout_s, NO_RETRY)
        except (UnavailableError, DeadlineExceededError):
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def knock(self, within_s: float) -> Any:
        """Begin a call that waits for a connection, and ends when it is answered, no matter how."""
        return self._health.Check.future(
            health_pb2.HealthCheckRequest(service=SERVICE),
            timeout=within_s,
            metadata=self.metadata(),
            wait_for_ready=True,
        )

    def _stream(
        self, method: Any, request: Any, request_id: str, timeout_s: float | None
    ) -> SyncAnswerStream:
        handle = CallHandle(self.calls, Attempts(self.retry, timeout_s), request_id)

        def attempt(left_s: float | None) -> Generator[Any, None, None]:
            call = handle.begin(lambda: self._send(method, request, left_s))
            handle.runs(call)
            return one_shot(call)

        return SyncAnswerStream(answer_deltas(attempt, handle, self.knock), handle)

    def _call(
        self, method: Any, request: Any, timeout_s: float | None, retry: Retry | None = None
    ) -> Any:
        """Make a call with one answer, as often as it takes."""
        with CallHandle(self.calls, Attempts(retry or self.retry, timeout_s)) as handle:
            while True:
                try:
                    return handle.begin(
                        lambda: self._send(method, request, handle.attempts.timeout_s())
                    )
                except grpc.RpcError as error:
                    failed = handle.failure(error)
                    pause_s = handle.pause_s(failed)
                    if pause_s is None:
                        raise failed from failed.__cause__
                before_next(failed, pause_s, handle, self.knock)

    def _send(self, method: Any, request: Any, left_s: float | None) -> Any:
        return method(request, timeout=left_s, metadata=self.metadata(), wait_for_ready=False)
