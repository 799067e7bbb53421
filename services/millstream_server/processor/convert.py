"""Protobuf to plain types and back, for the front door. Pure."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Sequence
from dataclasses import asdict

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import chat_pb2, processor_pb2, usage_pb2
from millstream_server.engines.base import EngineInfo, Role, TokenLogprob
from millstream_server.processor.generation import Delta, Generation, GenerationSpec
from millstream_server.processor.text.messages import ChatMessage, ChatRole, Tool, ToolCall
from millstream_server.processor.text.model_files import GenerationDefaults
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.places import Priority
from millstream_server.worker_stream import convert
from millstream_server.worker_stream.description import ROLES_TO_PROTO
from millstream_server.worker_stream.start import TraceContext

_ROLES = {
    chat_pb2.ROLE_SYSTEM: ChatRole.SYSTEM,
    chat_pb2.ROLE_DEVELOPER: ChatRole.DEVELOPER,
    chat_pb2.ROLE_USER: ChatRole.USER,
    chat_pb2.ROLE_ASSISTANT: ChatRole.ASSISTANT,
    chat_pb2.ROLE_TOOL: ChatRole.TOOL,
}

_PRIORITIES = {
    processor_pb2.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    processor_pb2.PRIORITY_LOW: Priority.LOW,
    processor_pb2.PRIORITY_NORMAL: Priority.NORMAL,
    processor_pb2.PRIORITY_HIGH: Priority.HIGH,
}


MAX_MESSAGES = 4096
MAX_PARTS = 16_384
"""Of all messages together. A part may be two bytes on the wire and is many more once read."""
MAX_TOOLS = 1024


def messages_from_proto(messages: Sequence[chat_pb2.Message], field: str) -> list[ChatMessage]:
    """Read messages, which came in ``field``.

    Raises:
        InvalidRequestError: they are more than anybody means; nothing was made of them.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError.of(field, f"at most {MAX_MESSAGES} messages")
    if sum(len(m.content) + len(m.tool_calls) for m in messages) > MAX_PARTS:
        raise InvalidRequestError.of(field, f"at most {MAX_PARTS} content parts and tool calls")
    return [message_from_proto(message) for message in messages]


def tools_from_proto(tools: Sequence[chat_pb2.Tool], field: str) -> list[Tool]:
    """Read tools, which came in ``field``.

    Raises:
        InvalidRequestError: they are more than anybody means; nothing was made of them.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError.of(field, f"at most {MAX_TOOLS} tools")
    return [tool_from_proto(tool) for tool in tools]


def message_from_proto(message: chat_pb2.Message) -> ChatMessage:
    """Read a message; a role this version doesn't know becomes None, which is refused later."""
    return ChatMessage(
        role=_ROLES.get(message.role),
        text=content_text(message.content),
        tool_calls=tuple(ToolCall(c.id, c.name, c.arguments_json) for c in message.tool_calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def content_text(parts: Sequence[chat_pb2.ContentPart]) -> str:
    """Join a message's text parts."""
    return "".join(part.text for part in parts)


def tool_from_proto(tool: chat_pb2.Tool) -> Tool:
    """Read a tool."""
    return Tool(tool.name, tool.description, tool.parameters_json_schema)


def spec_from_proto(
    options: processor_pb2.GenerationOptions,
    *,
    request_id: str,
    model: str,
    token_ids: Sequence[int],
    text: TextModel,
    engine: EngineInfo,
    timeout_s: float | None,
    trace: TraceContext,
) -> GenerationSpec:
    """Read a request's options; unset knobs take the model's own defaults."""
    return GenerationSpec(
        request_id=request_id or new_request_id(),
        model=model,
        token_ids=token_ids,
        sampling=convert.sampling_from_proto(
            options.sampling,
            unset_max_new_tokens=max(1, engine.context_length - len(token_ids)),
            **_given(text.generation_defaults),
        ),
        stops=tuple(options.stop),
        n=options.n if options.HasField("n") else 1,
        logprobs=convert.logprob_options_from_proto(options),
        min_interval_s=options.min_interval.ToNanoseconds() / 1e9,
        return_token_ids=options.return_token_ids,
        include_special_tokens=options.include_special_tokens,
        priority=_PRIORITIES.get(options.priority),
        timeout_s=timeout_s,
        trace=trace,
    )


@functools.cache
def _given(defaults: GenerationDefaults) -> dict[str, float]:
    return {name: value for name, value in asdict(defaults).items() if value is not None}


def new_request_id() -> str:
    """Make an id for a request whose client gave none."""
    return f"req-{secrets.token_hex(8)}"


def delta_to_proto(
    delta: Delta, spec: GenerationSpec, text: TextModel
) -> processor_pb2.ChoiceDelta:
    """Write what a choice grew by."""
    message = processor_pb2.ChoiceDelta(
        index=delta.index, text=delta.text, token_count=len(delta.token_ids)
    )
    if spec.return_token_ids:
        message.token_ids.extend(delta.token_ids)
    if delta.logprobs:
        message.logprobs.extend(logprob_to_proto(entry, text) for entry in delta.logprobs)
    if delta.finish_reason is not None:
        message.finish_reason = convert.finish_reason_to_proto(delta.finish_reason)
        if isinstance(delta.matched_stop, str):
            message.matched_stop.text = delta.matched_stop
        elif delta.matched_stop is not None:
            message.matched_stop.token_id = delta.matched_stop
    return message


def logprob_to_proto(entry: TokenLogprob, text: TextModel) -> processor_pb2.TokenLogprob:
    """Write one token's logprob, with the token's text and bytes."""
    return processor_pb2.TokenLogprob(
        token_id=entry.token_id,
        text=text.token_text(entry.token_id),
        token_bytes=text.token_bytes(entry.token_id),
        logprob=entry.logprob,
        top=[
            processor_pb2.TokenLogprob(
                token_id=token,
                text=text.token_text(token),
                token_bytes=text.token_bytes(token),
                logprob=logprob,
            )
            for token, logprob in entry.top
        ],
    )


def finished_to_proto(generation: Generation, text: TextModel) -> processor_pb2.TurnFinished:
    """Write the end of a turn."""
    usage = generation.usage()
    pace = Duration()
    pace.FromNanoseconds(int(generation.paced.longest_interval_s * 1e9))
    return processor_pb2.TurnFinished(
        usage=usage_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
        ),
        prompt_logprobs=[logprob_to_proto(e, text) for e in generation.prompt_logprobs()],
        longest_pacing_interval=pace,
    )


def model_to_proto(
    name: str, text: TextModel, *, ready: bool, engine: EngineInfo | None, workers: dict[Role, int]
) -> processor_pb2.Model:
    """Write a served model."""
    return processor_pb2.Model(
        name=name,
        ready=ready,
        context_length=engine.context_length if engine else text.context_length or 0,
        workers=[
            processor_pb2.ModelWorkers(role=ROLES_TO_PROTO[role], connected=count)
            for role, count in sorted(workers.items(), key=lambda item: item[0].value)
        ],
        chat=text.chat_template.available,
    )
