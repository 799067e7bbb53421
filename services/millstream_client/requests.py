"""Makes request messages from plain values."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict, overload

from millstream.v1 import chat_pb2, diffusion_pb2, embedding_pb2, processor_pb2
from millstream_client import openai_shapes
from millstream_client.errors import MediaFileError
from millstream_client.knobs import Knobs, generation_options
from millstream_client.media import Image, MediaSource, Part, Video

if TYPE_CHECKING:
    from typing import Unpack

Content = Part | Sequence[Part]
"""What one message says: a text, an image, a video, or several of them in order."""
TextInput = str | Sequence[chat_pb2.ChatMessage | Mapping[str, Any]]
"""A text, or a whole conversation."""
TextOrIds = str | Sequence[int]
"""A text, or its token ids."""
EmbedInput = TextOrIds | Sequence[TextOrIds]
"""One or more of them."""
_MAX_INPUTS = 2048
_MAX_BYTES = 3 << 20
"""A request's inputs: it has to fit in a message of 4 MiB."""
_OF_REQUESTS = ("model", "request_id", "priority")


@dataclass(frozen=True, slots=True)
class MediaMessage:
    """A message with images or videos, whose files are read when it is sent."""

    role: chat_pb2.ChatRole.ValueType
    content: tuple[Part, ...]
    tool_call_id: str = ""
    tool_calls: tuple[chat_pb2.ToolCall, ...] = ()
    name: str = ""

    def read(self) -> chat_pb2.ChatMessage:
        """Make the contract's message of it; blocks while it reads the files.

        Raises:
            MediaFileError: a file can't be read.
        """
        return chat_pb2.ChatMessage(
            role=self.role,
            content=[
                chat_pb2.ContentPart(text=part) if isinstance(part, str) else part.read()
                for part in self.content
            ],
            tool_call_id=self.tool_call_id,
            tool_calls=self.tool_calls,
            name=self.name,
        )


AnyMessage = chat_pb2.ChatMessage | MediaMessage
GivenMessage = AnyMessage | Mapping[str, Any]
"""A message, or a dict in the shape of OpenAI's chat API."""
ChatInput = Part | Sequence[Part | GivenMessage]
"""A question, or a whole conversation: a list has parts of one question, or messages.

It is one type of list, since type checkers can't tell two apart while they read a literal.
"""


def message(
    role: chat_pb2.ChatRole.ValueType, parts: Iterable[Part], tool_call_id: str = ""
) -> AnyMessage:
    """Make a message; only one with images or videos is a MediaMessage.

    Raises:
        TypeError: a part is neither text nor image nor video.
    """
    made = MediaMessage(role, tuple(parts), tool_call_id)
    for part in made.content:
        if not isinstance(part, Part):
            raise TypeError(f"a part is a str, an Image or a Video, not {type(part).__name__}")
    return _plain(made)


def _plain(made: MediaMessage) -> AnyMessage:
    return made.read() if all(isinstance(part, str) for part in made.content) else made


def system(text: str) -> chat_pb2.ChatMessage:
    """Make a system message: the operator's instructions."""
    return _text(chat_pb2.CHAT_ROLE_SYSTEM, text)


@overload
def user(*content: str) -> chat_pb2.ChatMessage: ...
@overload
def user(*content: Part) -> AnyMessage: ...
def user(*content: Part) -> AnyMessage:
    """Make a user's message of texts, images and videos, in any order."""
    return message(chat_pb2.CHAT_ROLE_USER, content)


def assistant(text: str) -> chat_pb2.ChatMessage:
    """Make a message of the model."""
    return _text(chat_pb2.CHAT_ROLE_ASSISTANT, text)


@overload
def tool_result(tool_call_id: str, *content: str) -> chat_pb2.ChatMessage: ...
@overload
def tool_result(tool_call_id: str, *content: Part) -> AnyMessage: ...
def tool_result(tool_call_id: str, *content: Part) -> AnyMessage:
    """Make a message with the result of a tool call: texts, images, videos."""
    return message(chat_pb2.CHAT_ROLE_TOOL, content, tool_call_id)


def _text(role: chat_pb2.ChatRole.ValueType, text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)])


def messages(
    said: ChatInput, system_text: str | None = None, media: Sequence[Image | Video] = ()
) -> list[AnyMessage]:
    """Make messages of a question or a conversation, after the system text if given.

    ``media`` comes before the question's text.

    Raises:
        TypeError: there is neither, or ``media`` and a conversation.
        ValueError: a dict has something that can't be sent.
    """
    first: list[AnyMessage] = [system(system_text)] if system_text else []
    if isinstance(said, Part) or any(isinstance(part, Part) for part in said):
        return [*first, question(said, media)]
    if media:
        raise TypeError(
            "image= and video= go with a question; in a list of messages write"
            " user('What is this?', Image('cat.png'))"
        )
    return [*first, *map(_given, said)]


def _given(given: Any) -> AnyMessage:
    """Return a message as it is, and make one of a dict."""
    if isinstance(given, AnyMessage):
        return given
    return _plain(MediaMessage(**openai_shapes.message_fields(given)))


def question(said: Any, media: Sequence[Image | Video] = ()) -> AnyMessage:
    """Make a user's message of content, after ``media``."""
    parts = [said] if isinstance(said, Part) else list(said)
    if media and parts == [""]:
        parts = []
    return message(chat_pb2.CHAT_ROLE_USER, [*media, *parts])


async def read_messages(said: Iterable[AnyMessage]) -> list[chat_pb2.ChatMessage]:
    """Make the contract's messages; files are read in a thread.

    Raises:
        MediaFileError: a file can't be read.
    """
    return [
        await asyncio.to_thread(one.read) if isinstance(one, MediaMessage) else one for one in said
    ]


class RequestKnobs(Knobs, total=False):
    """What every generation may be given."""

    model: str
    request_id: str


class ChatKnobs(RequestKnobs, total=False):
    """What a conversation may be given for all its turns."""

    tools: Sequence[openai_shapes.Tool]


def chat_start(
    *,
    model: str = "",
    tools: Sequence[openai_shapes.Tool] = (),
    request_id: str = "",
    **knobs: Unpack[Knobs],
) -> processor_pb2.ChatStart:
    """Make the first message of a Chat, without messages yet."""
    options = generation_options(**knobs)
    return processor_pb2.ChatStart(
        model=model,
        tools=openai_shapes.tools(tools),
        options=options,
        request_id=request_id or new_request_id(),
    )


def complete_request(
    prompt: TextOrIds, *, model: str = "", request_id: str = "", **knobs: Unpack[Knobs]
) -> processor_pb2.CompleteRequest:
    """Make the request of Complete from text or token ids."""
    request = processor_pb2.CompleteRequest(
        model=model, options=generation_options(**knobs), request_id=request_id or new_request_id()
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return request


def tokenize_request(
    said: TextInput, *, model: str, tools: Sequence[openai_shapes.Tool], special_tokens: bool
) -> processor_pb2.TokenizeRequest:
    """Make the request of Tokenize from raw text or a conversation."""
    if isinstance(said, str):
        return processor_pb2.TokenizeRequest(
            model=model, text=said, no_special_tokens=not special_tokens
        )
    plain: Any = [_given(message) for message in said]
    conversation = processor_pb2.Conversation(messages=plain, tools=openai_shapes.tools(tools))
    return processor_pb2.TokenizeRequest(model=model, conversation=conversation)


def new_request_id() -> str:
    """Make an id; made here, it is known even if the request fails before a response."""
    return secrets.token_hex(16)


# ---- images and videos ---------------------------------------------------------------------------


class DiffusionKnobs(TypedDict, total=False):
    """The fields of ``millstream.v1.DiffusionOptions``, without the prompt."""

    negative_prompt: str
    n: int
    width: int
    height: int
    steps: int
    guidance_scale: float
    seed: int
    scheduler: str
    delivery: diffusion_pb2.OutputDelivery.ValueType
    preview_every_steps: int


class MediaKnobs(DiffusionKnobs, total=False):
    """What a request for images or videos may be given."""

    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType


class ImageKnobs(MediaKnobs, total=False):
    """What a request for images may be given."""

    image: MediaSource | None
    strength: float | None
    format: diffusion_pb2.ImageFormat.ValueType


class VideoKnobs(MediaKnobs, total=False):
    """What a request for videos may be given."""

    frames: int | None
    fps: int | None


def image_request(
    prompt: str,
    *,
    image: MediaSource | None = None,
    strength: float | None = None,
    format: diffusion_pb2.ImageFormat.ValueType = diffusion_pb2.IMAGE_FORMAT_PNG,  # noqa: A002 - the contract's name
    **knobs: Unpack[MediaKnobs],
) -> diffusion_pb2.GenerateImageRequest:
    """Make the message of a request for images; reads the input image's file.

    Raises:
        MediaFileError: the input image can't be read.
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    start = diffusion_pb2.StartImage(format=format, **_diffusion(prompt, **knobs))
    if image is not None:
        part = Image(image).read().image
        if part.WhichOneof("source") != "data":
            raise MediaFileError("an input image is given as a file's path or bytes, not as a URL")
        start.input_image.data = part.data
        if strength is not None:
            start.input_image.strength = strength
    return diffusion_pb2.GenerateImageRequest(start=start)


def video_request(
    prompt: str, *, frames: int | None = None, fps: int | None = None, **knobs: Unpack[MediaKnobs]
) -> diffusion_pb2.GenerateVideoRequest:
    """Make the message of a request for videos.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
        ValueError: a value that doesn't fit its field.
    """
    start = diffusion_pb2.StartVideo(frames=frames, fps=fps, **_diffusion(prompt, **knobs))
    return diffusion_pb2.GenerateVideoRequest(start=start)


def _diffusion(prompt: str, **knobs: Any) -> dict[str, Any]:
    """Return the fields that both requests have; knobs left out are unset, for the defaults."""
    _check_names(knobs, MediaKnobs, "an image or a video")
    fields = {name: knobs.pop(name) for name in _OF_REQUESTS if name in knobs}
    return {**fields, "options": diffusion_pb2.DiffusionOptions(prompt=prompt, **knobs)}


def _check_names(knobs: Mapping[str, object], kind: Any, of: str) -> None:
    if unknown := knobs.keys() - kind.__annotations__.keys():
        raise TypeError(f"{min(unknown)!r} is no option of {of}")


# ---- vectors -------------------------------------------------------------------------------------


class EmbedKnobs(TypedDict, total=False):
    """What a request for vectors may be given."""

    dimensions: int | None
    normalize: bool | None
    prompt_name: str | None
    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType | None


class RerankKnobs(TypedDict, total=False):
    """What a request for scores may be given."""

    top_n: int | None
    instruction: str | None
    return_documents: bool
    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType


def embed_requests(
    texts: EmbedInput, **knobs: Unpack[EmbedKnobs]
) -> Iterator[embedding_pb2.EmbedRequest]:
    """Make the requests for texts: one, or more where they don't fit in one.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
    """
    _check_names(knobs, EmbedKnobs, "vectors")
    fields: Any = knobs  # a priority may be None, which leaves it unset
    return _batches(_listed(texts), embedding_pb2.StartEmbed(**fields))


def _batches(
    texts: Iterable[TextOrIds], start: embedding_pb2.StartEmbed
) -> Iterator[embedding_pb2.EmbedRequest]:
    request, size = embedding_pb2.EmbedRequest(start=start), 0
    for text in texts:
        part = _input(text)
        nbytes = part.ByteSize()
        count = len(request.start.inputs)
        if count and (count >= _MAX_INPUTS or size + nbytes > _MAX_BYTES):
            yield request
            request, size = embedding_pb2.EmbedRequest(start=start), 0
        request.start.inputs.append(part)
        size += nbytes
    yield request


def rerank_request(
    query: str, documents: Sequence[str], **knobs: Unpack[RerankKnobs]
) -> embedding_pb2.RerankRequest:
    """Make the request for scores.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
    """
    _check_names(knobs, RerankKnobs, "scores")
    return embedding_pb2.RerankRequest(query=query, documents=documents, **knobs)


def _listed(texts: Any) -> Sequence[TextOrIds]:
    """Return a list of inputs; a text, or the token ids of one, is one input."""
    one = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    listed: Sequence[TextOrIds] = [texts] if one else texts
    return listed


def _input(text: TextOrIds) -> embedding_pb2.EmbedInput:
    if isinstance(text, str):
        return embedding_pb2.EmbedInput(text=text)
    return embedding_pb2.EmbedInput(token_ids=processor_pb2.TokenIds(ids=text))
