"""The asyncio client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import (
    chat_pb2,
    diffusion_pb2,
    embedding_pb2,
    embedding_pb2_grpc,
    processor_pb2,
    processor_pb2_grpc,
)
from millstream.v1.processor_pb2 import REQUEST_PRIORITY_UNSPECIFIED, RequestPriority
from millstream_client import requests
from millstream_client.connection import Connection
from millstream_client.conversation import Conversation
from millstream_client.errors import DeadlineExceededError, UnavailableError
from millstream_client.generated_media import (
    DiffusionKnobs,
    MediaStream,
    diffusion_options,
    start_image,
)
from millstream_client.history import History, Turn
from millstream_client.knobs import Knobs, generation_options
from millstream_client.media import ImageInput, MediaSource, VideoInput, attached
from millstream_client.requests import AnyMessage, ChatInput, TextInput
from millstream_client.retry import NO_RETRY, Retry
from millstream_client.service_config import SERVICE
from millstream_client.streams import AnswerStream
from millstream_client.transport import Metadata, Options, Tls, plan_transport
from millstream_client.vectors import Embeddings, EmbedText, embed_requests

if TYPE_CHECKING:
    from typing import Unpack


class Client:
    """Talks to a Millstream suite; `SyncClient` does the same without asyncio.

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
        """Make a client; the first call connects.

        Raises:
            ValueError: the address is invalid, or an API key would be sent unencrypted.
            OSError: a TLS file can't be read.
        """
        transport = plan_transport(address, api_key, tls, options or Options())
        self.connection = Connection(transport, retry or Retry())

    @property
    def channel(self) -> grpc.aio.Channel:
        """The gRPC channel, for calls without a method here.

        Raises:
            RequestCancelledError: the client was closed.
        """
        return self.connection.channel

    @property
    def stub(self) -> processor_pb2_grpc.ProcessorServiceStub:
        """The generated stub on `channel`; give its calls `metadata`.

        Raises:
            RequestCancelledError: the client was closed.
        """
        return self.connection.stub

    def metadata(self) -> Metadata:
        """Return every call's metadata: the API key, and the current trace."""
        return self.connection.metadata()

    async def close(self) -> None:
        """Disconnect; running and later calls fail with a RequestCancelledError."""
        await self.connection.close()

    async def __aenter__(self) -> Self:
        """Return the client."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Disconnect."""
        await self.close()

    def chat(
        self,
        messages: ChatInput,
        *,
        image: ImageInput | None = None,
        images: Sequence[ImageInput] = (),
        video: VideoInput | None = None,
        videos: Sequence[VideoInput] = (),
        system: str | None = None,
        model: str = "",
        tools: Sequence[chat_pb2.ChatTool] = (),
        request_id: str = "",
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> AnswerStream:
        """Send a question or a conversation; return the answer's stream.

        Images and videos, given as paths, bytes or URLs, come before the question's text. For
        another order give a list: ``["Left:", Image("a.png"), "Right:", Image("b.png")]``.
        """
        media = attached(image, images, video, videos)
        start = requests.chat_start(
            model=model,
            tools=tools,
            request_id=request_id,
            options=generation_options(**knobs),
        )
        turn = Turn(requests.messages(messages, system, media))
        return self.connection.chat(History(start), turn, timeout_s)

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **knobs: Unpack[Knobs],
    ) -> AnswerStream:
        """Continue a raw prompt, text or token ids, without a chat template."""
        request = requests.complete_request(
            prompt, model=model, options=generation_options(**knobs), request_id=request_id
        )
        return self.connection.stream(
            lambda: self.stub.Complete, request, request.request_id, timeout_s
        )

    def conversation(
        self,
        messages: Sequence[AnyMessage] = (),
        *,
        system: str | None = None,
        model: str = "",
        tools: Sequence[chat_pb2.ChatTool] = (),
        request_id: str = "",
        **knobs: Unpack[Knobs],
    ) -> Conversation:
        """Make a conversation of several turns; ``messages`` come before the first."""
        start = requests.chat_start(
            model=model,
            tools=tools,
            request_id=request_id,
            options=generation_options(**knobs),
        )
        return Conversation(self.connection, History(start, requests.messages(messages, system)))

    async def tokenize(
        self,
        text: TextInput,
        *,
        model: str = "",
        tools: Sequence[chat_pb2.ChatTool] = (),
        special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> processor_pb2.TokenizeResponse:
        """Turn text, or a conversation through the model's chat template, into token ids."""
        request = requests.tokenize_request(
            text, model=model, tools=tools, special_tokens=special_tokens
        )
        response: processor_pb2.TokenizeResponse = await self.connection.call(
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
        response = await self.connection.call(lambda: self.stub.Detokenize, request, timeout_s)
        return str(response.text)

    def generate_image(
        self,
        prompt: str,
        *,
        image: MediaSource | None = None,
        strength: float | None = None,
        format: diffusion_pb2.ImageFormat.ValueType = diffusion_pb2.IMAGE_FORMAT_PNG,  # noqa: A002
        model: str = "",
        request_id: str = "",
        priority: RequestPriority.ValueType = REQUEST_PRIORITY_UNSPECIFIED,
        timeout_s: float | None = None,
        **knobs: Unpack[DiffusionKnobs],
    ) -> MediaStream:
        """Make images from words, or from an image, a path or bytes, and words.

        Raises:
            MediaFileError: the input image can't be read.
        """
        request = start_image(
            diffusion_options(prompt, **knobs),
            model=model,
            image=image,
            strength=strength,
            format=format,
            request_id=request_id,
            priority=priority,
        )
        return self.connection.media(diffusion_pb2.GenerateImageResponse, request, timeout_s)

    def generate_video(
        self,
        prompt: str,
        *,
        frames: int | None = None,
        fps: int | None = None,
        model: str = "",
        request_id: str = "",
        priority: RequestPriority.ValueType = REQUEST_PRIORITY_UNSPECIFIED,
        timeout_s: float | None = None,
        **knobs: Unpack[DiffusionKnobs],
    ) -> MediaStream:
        """Make videos from words."""
        start = diffusion_pb2.StartVideo(
            model=model,
            request_id=request_id,
            options=diffusion_options(prompt, **knobs),
            frames=frames,
            fps=fps,
            priority=priority,
        )
        request = diffusion_pb2.GenerateVideoRequest(start=start)
        return self.connection.media(diffusion_pb2.GenerateVideoResponse, request, timeout_s)

    async def embed(
        self,
        texts: EmbedText | Sequence[EmbedText],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        model: str = "",
        request_id: str = "",
        priority: processor_pb2.RequestPriority.ValueType | None = None,
        timeout_s: float | None = None,
    ) -> Embeddings:
        """Turn texts, or their token ids, into vectors; a single text gives one vector.

        More texts than fit in one request are sent in several, one after another.
        """
        requests_ = embed_requests(
            [texts] if isinstance(texts, str) else _listed(texts),
            dimensions=dimensions,
            normalize=normalize,
            model=model,
            request_id=request_id,
            priority=priority,
        )
        result = Embeddings()
        for request in requests_:
            found = await self.connection.embed(request, timeout_s)
            result.vectors += [found.found[i] for i in range(found.count)]
            result.model, result.request_id = found.model, found.request_id
            result.input_tokens += found.input_tokens
        return result

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        return_documents: bool = False,
        model: str = "",
        request_id: str = "",
        priority: RequestPriority.ValueType = REQUEST_PRIORITY_UNSPECIFIED,
        timeout_s: float | None = None,
    ) -> list[embedding_pb2.RankedDocument]:
        """Score documents by how well they answer a query; return them best first."""
        request = embedding_pb2.RerankRequest(
            model=model,
            query=query,
            documents=documents,
            top_n=top_n,
            return_documents=return_documents,
            request_id=request_id,
            priority=priority,
        )
        stub = embedding_pb2_grpc.EmbeddingServiceStub
        response = await self.connection.call(lambda: stub(self.channel).Rerank, request, timeout_s)
        return list(response.results)

    async def models(self, *, timeout_s: float | None = None) -> list[processor_pb2.ServedModel]:
        """Return the models that are served."""
        request = processor_pb2.ListModelsRequest()
        response = await self.connection.call(lambda: self.stub.ListModels, request, timeout_s)
        return list(response.models)

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Return whether a server is reachable and serving."""
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        try:
            response = await self.connection.call(
                lambda: health_pb2_grpc.HealthStub(self.channel).Check, request, timeout_s, NO_RETRY
            )
        except (UnavailableError, DeadlineExceededError):
            return False
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def _listed(texts: Sequence[EmbedText] | Sequence[int]) -> Sequence[EmbedText]:
    """Return a list of inputs; the token ids of one text are one input."""
    if texts and isinstance(texts[0], int):
        return [texts]  # type: ignore[list-item]
    return texts  # type: ignore[return-value]
