"""Bodies of requests, as OpenAI's API has them. What isn't here is ignored, as OpenAI does.

A field that is known but can't be done is here all the same, in `UNSUPPORTED`, and is refused.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError

T = TypeVar("T")

_AT = re.compile(r"(?P<why>.*?) - at `\$\.?(?P<path>[^`]*)`", re.DOTALL)


NULL = msgspec.Raw(b"null")
ABSENT: Any = msgspec.field(default_factory=lambda: NULL)
"""A field of any JSON that may be left out; as a plain default msgspec makes no schema of it."""
"""In place of a field that is left out and would take any value."""


BROKEN = (msgspec.DecodeError, UnicodeDecodeError)
"""Errors of reading a body, or what it has in a `msgspec.Raw`: that was only skipped."""


class Json(msgspec.Struct, gc=False):
    """A part of a body. The garbage collector needn't know it: what JSON says has no cycles."""


class ImageUrl(Json):
    """Where an image or a video is."""

    url: str


class TextPart(Json, tag_field="type", tag="text"):
    """A piece of text."""

    text: str


class RefusalPart(Json, tag_field="type", tag="refusal"):
    """What an earlier answer refused."""

    refusal: str


class ImagePart(Json, tag_field="type", tag="image_url"):
    """An image."""

    image_url: ImageUrl


class VideoPart(Json, tag_field="type", tag="video_url"):
    """A video."""

    video_url: ImageUrl


class AudioPart(Json, tag_field="type", tag="input_audio"):
    """Refused."""


class FilePart(Json, tag_field="type", tag="file"):
    """Refused."""


Part = TextPart | RefusalPart | ImagePart | VideoPart | AudioPart | FilePart


class CalledFunction(Json):
    """A call's tool and its arguments: a JSON object as text, or what else clients make of it."""

    name: str
    arguments: msgspec.Raw = ABSENT


class Call(Json):
    """A call of an earlier answer."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class Message(Json):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Function(Json):
    """A tool."""

    name: str
    description: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    strict: bool | None = None


class Tool(Json):
    """A tool, of the one type that there is here."""

    function: Function
    type: Literal["function"] = "function"


class NamedFunction(Json):
    """The name of a tool."""

    name: str


class NamedTool(Json):
    """The one tool that must be called."""

    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(Json):
    """A JSON Schema and its name."""

    schema: msgspec.Raw = msgspec.field(default_factory=msgspec.Raw)
    name: str = ""


class ResponseFormat(Json):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Json):
    """What a stream of events has besides."""

    include_usage: bool | None = None


class TemplateOptions(Json, forbid_unknown_fields=True):
    """Variables of the model's chat template."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: str | None = None


Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
"""What the contract's fields hold; the pipeline's own bounds are narrower."""
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Generation(Json, kw_only=True):
    """What chats and completions have in common."""

    model: str = ""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int32 | None = None
    max_tokens: Int32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    logit_bias: msgspec.Raw = ABSENT
    skip_special_tokens: bool | None = None
    priority: Literal["low", "normal", "high"] | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = None
    prompt_logprobs: msgspec.Raw = ABSENT
    use_beam_search: msgspec.Raw = ABSENT


class Chat(Generation, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[Message]
    max_completion_tokens: Int32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    # Refused
    audio: msgspec.Raw = ABSENT
    functions: msgspec.Raw = ABSENT
    function_call: msgspec.Raw = ABSENT
    web_search_options: msgspec.Raw = ABSENT
    modalities: list[str] | None = None
    store: bool | None = None
    verbosity: str | None = None


Ids = Annotated[list[TokenId], msgspec.Meta(min_length=1)]


class Completion(Generation, kw_only=True):
    """The body of /v1/completions."""

    prompt: msgspec.Raw
    logprobs: Int32 | None = None
    # Refused
    suffix: str | None = None
    echo: bool | None = None
    best_of: Int32 | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "functions": (None,),
    "function_call": (None,),
    "web_search_options": (None,),
    "modalities": (None, ["text"]),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "prompt_logprobs": (None,),
    "use_beam_search": (None, False),
    "suffix": (None, ""),
    "echo": (None, False),
}
"""Fields that are refused, and values that ask for nothing."""
_LONGEST_NOTHING = 16
"""Of these values, in bytes, with blanks."""
_INSTEAD = {
    "functions": "; use tools",
    "function_call": "; use tool_choice",
    "echo": "; put the prompt in front of the text yourself",
    "store": "; the server keeps no conversations",
    "previous_response_id": "; it keeps no responses: send the whole conversation as input",
    "conversation": "; it keeps no conversations: send the whole one as input",
    "max_tokens": "; use max_output_tokens",
}


def read(
    decoder: msgspec.json.Decoder[T],
    body: bytes,
    unsupported: Mapping[str, tuple[Any, ...]] = UNSUPPORTED,
) -> T:
    """Read a body; ``unsupported`` is as `UNSUPPORTED`.

    Raises:
        InvalidRequestError: it is no JSON, or a field has another type; or
            (`UnsupportedFeatureError`) asks for what this server can't do.
    """
    found = decoded(decoder, body)
    check_supported(found, unsupported)
    return found


def decoded(decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw, field: str = "") -> T:
    """Read JSON; ``field`` is the path of what isn't a whole body.

    A whole body is UTF-8 throughout: msgspec itself looks at no text in a `msgspec.Raw`.

    Raises:
        InvalidRequestError: it is no JSON, or a part of it has another type.
    """
    try:
        if isinstance(body, bytes) and not body.isascii():
            body.decode()
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise violation(str(error), field) from None
    except BROKEN as error:
        raise InvalidRequestError(f"the body is no JSON: {error}") from None
    except RecursionError:
        raise InvalidRequestError("the body is nested too deep") from None


def check_supported(found: Any, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Check that a body asks for nothing that this server can't do.

    Raises:
        UnsupportedFeatureError: it does.
    """
    for name, nothing in unsupported.items():
        if _value(getattr(found, name, None)) not in nothing:
            why = f"is not supported by this server{_INSTEAD.get(name, '')}"
            raise UnsupportedFeatureError.of(name, why)


def _value(given: Any) -> Any:
    """Return a field's value; one of any type isn't read where it is long."""
    if given is NULL:
        return None
    if not isinstance(given, msgspec.Raw) or len(memoryview(given)) > _LONGEST_NOTHING:
        return given
    with contextlib.suppress(*BROKEN):
        return msgspec.json.decode(given)
    return given


def violation(text: str, field: str = "") -> InvalidRequestError:
    """Return the refusal of what isn't as msgspec was told; ``field`` is its path in the body."""
    found = _AT.fullmatch(text)
    if found is None and not field:
        return InvalidRequestError(f"the body isn't as it should be: {text}")
    path, why = (found["path"], found["why"]) if found else ("", text)
    return InvalidRequestError.of(f"{field}{path}" or "body", why)
