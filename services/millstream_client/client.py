"""The asyncio client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import grpc

from millstream.v1 import diffusion_pb2, embedding_pb2, processor_pb2, processor_pb2_grpc
from millstream_client import diffusion_requests, requests, vector_requests
from millstream_client.answers import Answer
from millstream_client.chat import ask
from millstream_client.connection import Connection
from millstream_client.conversation import Conversation
from millstream_client.functions import functions_of
from millstream_client.history import History, Turn
from millstream_client.media import ImageInput, VideoInput, attached
from millstream_client.openai_shapes import Tool
from millstream_client.request import Retry
from millstream_client.requests import AnyMessage, ChatInput, GivenMessage, TextInput, TextOrIds
from millstream_client.results import Embeddings
from millstream_client.service_config import EMBEDDING_SERVICE, SERVICE
from millstream_client.streams import AnswerStream, MediaStream
from millstream_client.structured import constraint_of
from millstream_client.transport import Metadata, Options, Tls, plan_transport
from millstream_client.vector_requests import EmbedInput

if TYPE_CHECKING:
    from typing import Unpack

    from millstream_client.diffusion_requests import ImageKnobs, VideoKnobs
    from millstream_client.requests import ChatKnobs, RequestKnobs
    from millstream_client.vector_requests import EmbedKnobs, RerankKnobs


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
        return self

    async def __aexit__(self, *_: object) -> None:
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
        answer_type: Any = None,
        timeout_s: float | None = None,
        **knobs: Unpack[ChatKnobs],
    ) -> AnswerStream:
        """Send a question or a conversation; return the answer's stream.

        Messages and ``tools`` may also be dicts in the shape of OpenAI's chat API, and ``tools``
        Python functions, which `AnswerStream.run_tools` runs (docs/tools.md).

        With ``answer_type``, a pydantic model, a dataclass, a TypedDict or a JSON Schema, the
        answer is JSON that fits it, and `Answer.parsed` is the object (docs/structured-output.md).

        Images and videos, given as paths, bytes or URLs, come before the question's text. For
        another order give a list: ``["Left:", Image("a.png"), "Right:", Image("b.png")]``.
        """
        media = attached(image, images, video, videos)
        turn = Turn(requests.messages(messages, system, media))
        if answer_type is not None:
            if "constraint" in knobs:
                raise TypeError("answer_type= is a constraint itself: give one of the two")
            knobs["constraint"] = constraint_of(answer_type)
        return ask(self.connection, _history(**knobs), turn, timeout_s, answer_type)

    def complete(
        self, prompt: TextOrIds, *, timeout_s: float | None = None, **knobs: Unpack[RequestKnobs]
    ) -> AnswerStream:
        """Continue a raw prompt, text or token ids, without a chat template."""
        request = requests.complete_request(prompt, **knobs)
        return self.connection.complete(request, timeout_s)

    def conversation(
        self,
        messages: Sequence[GivenMessage] = (),
        *,
        system: str | None = None,
        **knobs: Unpack[ChatKnobs],
    ) -> Conversation:
        """Make a conversation of several turns; ``messages`` come before the first."""
        said = requests.messages(messages, system)
        return Conversation(self.connection, _history(said, **knobs))

    async def render(
        self,
        messages: ChatInput,
        *,
        system: str | None = None,
        timeout_s: float | None = None,
        **knobs: Unpack[ChatKnobs],
    ) -> processor_pb2.RenderResponse:
        """Return the prompt that `chat` would send to the model, as text and as token ids.

        Its ``reading`` is what `parse` needs to read the answer to it.

        Raises:
            MediaFileError: the file of an image or a video can't be read.
        """
        start = requests.chat_start(**knobs)
        start.messages.extend(await requests.read_messages(requests.messages(messages, system)))
        request = processor_pb2.RenderRequest(start=start)
        return await self.connection.call(
            f"/{SERVICE}/Render", processor_pb2.RenderResponse, request, timeout_s
        )

    async def parse(
        self,
        answer: TextOrIds,
        reading: processor_pb2.AnswerReading | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Answer:
        """Tell reasoning, text and calls of a whole answer apart, which came from elsewhere.

        ``answer`` is its token ids, or its text with the special tokens that mark something;
        ``reading`` is `render`'s, or says the model or the format.
        """
        request = requests.parse_request(answer, reading)
        return await self.connection.parse(request, timeout_s)

    async def tokenize(
        self,
        text: TextInput,
        *,
        model: str = "",
        tools: Sequence[Tool] = (),
        special_tokens: bool = True,
        timeout_s: float | None = None,
    ) -> processor_pb2.TokenizeResponse:
        """Turn text, or a conversation through the model's chat template, into token ids."""
        request = requests.tokenize_request(
            text, model=model, tools=tools, special_tokens=special_tokens
        )
        return await self.connection.call(
            f"/{SERVICE}/Tokenize", processor_pb2.TokenizeResponse, request, timeout_s
        )

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
        response = await self.connection.call(
            f"/{SERVICE}/Detokenize", processor_pb2.DetokenizeResponse, request, timeout_s
        )
        return response.text

    def generate_image(
        self, prompt: str, *, timeout_s: float | None = None, **knobs: Unpack[ImageKnobs]
    ) -> MediaStream:
        """Make images from words, or from an ``image``, a path or bytes, and words.

        Raises:
            MediaFileError: the input image can't be read.
        """
        request = diffusion_requests.image_request(prompt, **knobs)
        return self.connection.media(diffusion_pb2.GenerateImageResponse, request, timeout_s)

    def generate_video(
        self, prompt: str, *, timeout_s: float | None = None, **knobs: Unpack[VideoKnobs]
    ) -> MediaStream:
        """Make videos from words."""
        request = diffusion_requests.video_request(prompt, **knobs)
        return self.connection.media(diffusion_pb2.GenerateVideoResponse, request, timeout_s)

    async def embed(
        self, texts: EmbedInput, *, timeout_s: float | None = None, **knobs: Unpack[EmbedKnobs]
    ) -> Embeddings:
        """Turn texts, or their token ids, into vectors; a single text gives one vector.

        More texts than fit in one request are sent in several, one after another.
        """
        return await self.connection.embed(
            vector_requests.embed_requests(texts, **knobs), timeout_s
        )

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        timeout_s: float | None = None,
        **knobs: Unpack[RerankKnobs],
    ) -> list[embedding_pb2.RankedDocument]:
        """Score documents by how well they answer a query; return them best first."""
        request = vector_requests.rerank_request(query, documents, **knobs)
        response = await self.connection.call(
            f"/{EMBEDDING_SERVICE}/Rerank", embedding_pb2.RerankResponse, request, timeout_s
        )
        return list(response.results)

    async def models(self, *, timeout_s: float | None = None) -> list[processor_pb2.ServedModel]:
        """Return the models that are served."""
        request = processor_pb2.ListModelsRequest()
        response = await self.connection.call(
            f"/{SERVICE}/ListModels", processor_pb2.ListModelsResponse, request, timeout_s
        )
        return list(response.models)

    async def health(self, *, timeout_s: float = 5.0) -> bool:
        """Return whether a server is reachable and serving."""
        return await self.connection.is_serving(timeout_s)


def _history(said: Sequence[AnyMessage] = (), **knobs: Unpack[ChatKnobs]) -> History:
    return History(requests.chat_start(**knobs), said, functions_of(knobs.get("tools", ())))
