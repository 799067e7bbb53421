"""Requests from plain values: what is left out stays unset, and takes the server's default."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypedDict

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2

if TYPE_CHECKING:
    from typing import Unpack

ASK = (
    "/millstream.v1.ProcessorService/Chat",
    processor_pb2.ChatRequest.SerializeToString,
    processor_pb2.ChatResponse.FromString,
)
"""Chat's path and codecs, for a call with one message."""

Say = str | Sequence[chat_pb2.Message]
"""A question, or a whole conversation."""


class Sampling(TypedDict, total=False):
    """Fields of ``millstream.v1.SamplingParams`` that callers name directly."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    max_new_tokens: int
    min_new_tokens: int
    ignore_eos: bool
    seed: int


class Knobs(Sampling, total=False):
    """What a generation can be told; the proto's `GenerationOptions`, flat."""

    sampling: sampling_pb2.SamplingParams
    """All of sampling at once; knobs named beside it win."""
    stop: Sequence[str]
    n: int
    logprobs: sampling_pb2.LogprobOptions
    min_interval_s: float
    return_token_ids: bool
    include_special_tokens: bool
    priority: processor_pb2.Priority.ValueType


_SAMPLING = frozenset(Sampling.__annotations__)


def generation_options(**knobs: Unpack[Knobs]) -> processor_pb2.GenerationOptions:
    """Build a generation's options.

    Raises:
        TypeError: a knob that there isn't.
        ValueError: a value that doesn't fit its field.
    """
    options = processor_pb2.GenerationOptions()
    if "sampling" in knobs:
        options.sampling.CopyFrom(knobs["sampling"])
    for name, value in knobs.items():
        if name in _SAMPLING:
            setattr(options.sampling, name, value)
        elif name == "stop":
            options.stop.extend([value] if isinstance(value, str) else knobs["stop"])
        elif name == "logprobs":
            options.logprobs.CopyFrom(knobs["logprobs"])
        elif name == "min_interval_s":
            options.min_interval.FromNanoseconds(round(knobs["min_interval_s"] * 1e9))
        elif name in Knobs.__annotations__:
            if name != "sampling":
                setattr(options, name, value)
        else:
            raise TypeError(f"{name!r} is no option of a generation")
    return options


def message(role: chat_pb2.Role.ValueType, text: str) -> chat_pb2.Message:
    """Make a message of one text part."""
    return chat_pb2.Message(role=role, content=[chat_pb2.ContentPart(text=text)])


def system(text: str) -> chat_pb2.Message:
    """Make the operator's instructions."""
    return message(chat_pb2.ROLE_SYSTEM, text)


def user(text: str) -> chat_pb2.Message:
    """Make a message of the user."""
    return message(chat_pb2.ROLE_USER, text)


def assistant(text: str) -> chat_pb2.Message:
    """Make an answer of the model, to go on from."""
    return message(chat_pb2.ROLE_ASSISTANT, text)


def tool_result(tool_call_id: str, text: str) -> chat_pb2.Message:
    """Make the result of a tool that the model called."""
    return chat_pb2.Message(
        role=chat_pb2.ROLE_TOOL,
        content=[chat_pb2.ContentPart(text=text)],
        tool_call_id=tool_call_id,
    )


def messages(said: Say, system_text: str | None = None) -> list[chat_pb2.Message]:
    """Make messages of a question or a conversation, after the instructions if there are any."""
    first = [system(system_text)] if system_text else []
    return first + ([user(said)] if isinstance(said, str) else list(said))


def chat_start(
    said: Say,
    *,
    system_text: str | None,
    model: str,
    tools: Sequence[chat_pb2.Tool],
    options: processor_pb2.GenerationOptions,
    request_id: str,
) -> processor_pb2.ChatStart:
    """Make the first message of a Chat."""
    return processor_pb2.ChatStart(
        model=model,
        messages=messages(said, system_text),
        tools=tools,
        options=options,
        request_id=request_id or new_request_id(),
    )


def complete_request(
    prompt: str | Sequence[int],
    *,
    model: str,
    options: processor_pb2.GenerationOptions,
    request_id: str,
) -> processor_pb2.CompleteRequest:
    """Make a Complete from text or token ids."""
    request = processor_pb2.CompleteRequest(
        model=model, options=options, request_id=request_id or new_request_id()
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(prompt)
    return request


def tokenize_request(
    said: Say, *, model: str, tools: Sequence[chat_pb2.Tool], special_tokens: bool
) -> processor_pb2.TokenizeRequest:
    """Make a Tokenize of raw text, or of a conversation through the chat template."""
    if isinstance(said, str):
        return processor_pb2.TokenizeRequest(
            model=model, text=said, no_special_tokens=not special_tokens
        )
    conversation = processor_pb2.Conversation(messages=said, tools=tools)
    return processor_pb2.TokenizeRequest(model=model, conversation=conversation)


def new_request_id() -> str:
    """Make an id: chosen here, it is known also when the request fails before its first answer."""
    return secrets.token_hex(16)
