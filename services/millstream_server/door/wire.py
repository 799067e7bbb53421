"""What the endpoints ask, as messages of the contract, and what Processors answer, as plain types.

No side effects. `millstream_server.processor.convert` has the other direction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from millstream.v1 import chat_pb2, media_pb2, processor_pb2
from millstream_server.control.engine import Task
from millstream_server.diffusion.diffuser import ImageDefaults
from millstream_server.formats.events import Arguments, CallEnd, CallStart, Event, Reasoning, Text
from millstream_server.generation.output import TokenLogprob
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.wire import (
    finish_reason_from_proto,
    sampling_fields,
    write_sampling_fields,
)
from millstream_server.media.items import Geometry, MediaInput, Modality, Span
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.choice import Delta
from millstream_server.processor.conversation import Completion, Conversation, Options
from millstream_server.processor.convert import SAME_NAME
from millstream_server.processor.telemetry import Usage
from millstream_server.processor.text.messages import ChatMessage, ChatRole, MediaPart, Tool
from millstream_server.processor.text.switches import asked_of
from millstream_server.processor.texts import ListedModel, UntokenizedChat
from millstream_server.protobuf.common import PRIORITIES_TO_PROTO
from millstream_server.protobuf.media import MODALITIES
from millstream_server.runtime.errors import InvalidRequestError

_ROLES = {role: chat_pb2.ChatRole.Value(f"CHAT_ROLE_{role.name}") for role in ChatRole}
_OUTPUTS = {
    False: processor_pb2.CHAT_OUTPUT_TEXT,
    True: processor_pb2.CHAT_OUTPUT_EVENTS,
    None: processor_pb2.CHAT_OUTPUT_WHERE_NEEDED,
}
_TASKS = {processor_pb2.ModelTask.Value(f"MODEL_TASK_{task.name}"): task for task in Task}
_GENERATES = {Task.CHAT, Task.COMPLETE}


def sendable(make: Callable[[], Any]) -> Any:
    """Return a message, whose numbers and texts protobuf has looked at.

    Raises:
        InvalidRequestError: one has a value that the contract can't hold.
    """
    try:
        return make()
    except (ValueError, TypeError) as error:  # UnicodeEncodeError, too
        raise InvalidRequestError(f"a value can't be sent to the Processor: {error}") from None


# ---- chats ---------------------------------------------------------------------------------------


def start_of(conversation: Conversation) -> processor_pb2.ChatStart:
    """Write a conversation whose last message is to be answered."""
    start = processor_pb2.ChatStart(
        model=conversation.model,
        request_id=conversation.request_id,
        messages=map(_message, conversation.messages),
        tools=map(_tool, conversation.tools),
    )
    _write_answers(start, conversation.answers)
    _write_options(start.options, conversation.options)
    return start


def completion_of(completion: Completion) -> processor_pb2.CompleteRequest:
    """Write a raw prompt and its options."""
    request = processor_pb2.CompleteRequest(
        model=completion.model, request_id=completion.request_id
    )
    if isinstance(completion.prompt, str):
        request.text = completion.prompt
    else:
        request.token_ids.SetInParent()
        request.token_ids.ids.extend(completion.prompt)
    _write_options(request.options, completion.options)
    return request


def tokenize_chat_of(chat: UntokenizedChat) -> processor_pb2.TokenizeRequest:
    """Write a conversation to be tokenized."""
    request = processor_pb2.TokenizeRequest(model=chat.model, return_token_bytes=chat.with_bytes)
    conversation = request.conversation
    conversation.messages.extend(map(_message, chat.messages))
    if chat.answers.with_tools:
        conversation.tools.extend(map(_tool, chat.tools))
    _write_reasoning(conversation.reasoning, chat.answers)
    conversation.continue_final_message = bool(chat.paths.continues)
    return request


def _message(message: ChatMessage) -> chat_pb2.ChatMessage:
    parts: Iterable[str | MediaPart] = message.parts or ([message.text] if message.text else [])
    return chat_pb2.ChatMessage(
        role=_ROLES[message.role] if message.role else chat_pb2.CHAT_ROLE_UNSPECIFIED,
        content=map(_part, parts),
        tool_calls=[
            chat_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments_json)
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning=message.reasoning,
    )


def _part(part: str | MediaPart) -> chat_pb2.ContentPart:
    if isinstance(part, str):
        return chat_pb2.ContentPart(text=part)
    media = media_pb2.Media(url=part.url) if part.url else media_pb2.Media(data=part.data)
    if part.modality is Modality.VIDEO:
        return chat_pb2.ContentPart(video=media)
    return chat_pb2.ContentPart(image=media)


def _tool(tool: Tool) -> chat_pb2.ChatTool:
    return chat_pb2.ChatTool(
        name=tool.name,
        description=tool.description,
        parameters_json_schema=tool.parameters_json_schema,
        strict=tool.strict,
    )


def _write_answers(start: processor_pb2.ChatStart, answers: AnswerOptions) -> None:
    start.output = _OUTPUTS[answers.events]
    if answers.only:
        start.tool_choice.mode = processor_pb2.TOOL_CHOICE_MODE_NAMED
        start.tool_choice.name = answers.only
    elif answers.must_call:
        start.tool_choice.mode = processor_pb2.TOOL_CHOICE_MODE_REQUIRED
    elif not answers.with_tools:
        start.tool_choice.mode = processor_pb2.TOOL_CHOICE_MODE_NONE
    if answers.one_call:
        start.parallel_tool_calls = False
    start.continue_final_message = answers.continues
    if answers.reasoning_tokens is not None:
        start.reasoning.max_tokens = answers.reasoning_tokens
    _write_reasoning(start.reasoning, answers)


def _write_reasoning(message: processor_pb2.ReasoningOptions, answers: AnswerOptions) -> None:
    (_, enabled), (_, effort) = asked_of(answers.switches)
    if enabled is not None:
        message.enabled = enabled
    if effort:
        message.effort = effort
    message.if_supported = answers.if_known


def _write_options(message: processor_pb2.GenerationOptions, options: Options) -> None:
    write_sampling_fields(message.sampling, options.sampling)
    for name in SAME_NAME:
        setattr(message, name, getattr(options, name))
    message.stop.extend(options.stops)
    if options.priority is not None:
        message.priority = PRIORITIES_TO_PROTO[options.priority]
    message.min_interval.FromNanoseconds(int(options.min_interval_s * 1e9))
    if options.logprobs is not None:
        message.logprobs.SetInParent()
        message.logprobs.top = options.logprobs.top
        message.logprobs.prompt = options.logprobs.prompt
    message.describe_start = True


# ---- output --------------------------------------------------------------------------------------


def events_of(delta: processor_pb2.ChoiceDelta, call: int) -> tuple[list[Event], int]:
    """Return a delta's events, and the index of the last call; ``call`` is the one before it."""
    events: list[Event] = []
    for message in delta.events:
        match message.WhichOneof("event"):
            case "text":
                events.append(Text(message.text))
            case "reasoning":
                events.append(Reasoning(message.reasoning))
            case "tool_call_start":
                start = message.tool_call_start
                call = start.index
                events.append(CallStart(call, start.id, start.name))
            case "tool_call_arguments_json":
                events.append(Arguments(call, message.tool_call_arguments_json))
            case "tool_call_end":
                events.append(CallEnd(call, message.tool_call_end.incomplete))
    return events, call


def logprobs_of(
    delta: processor_pb2.ChoiceDelta, texts: dict[int, bytes]
) -> Sequence[TokenLogprob]:
    """Return a delta's logprobs; ``texts`` gets the bytes of their tokens."""
    found = []
    for entry in delta.logprobs:
        texts[entry.token_id] = entry.token_bytes
        texts.update((other.token_id, other.token_bytes) for other in entry.top)
        top = tuple((other.token_id, other.logprob) for other in entry.top)
        found.append(TokenLogprob(entry.token_id, entry.logprob, top))
    return found


def delta_of(
    index: int,
    deltas: Sequence[processor_pb2.ChoiceDelta],
    events: Sequence[Event],
    logprobs: Sequence[TokenLogprob],
) -> Delta:
    """Return what several deltas of one choice have together."""
    last = deltas[-1]
    stop = last.matched_stop.WhichOneof("stop")
    return Delta(
        index,
        "".join([delta.text for delta in deltas]),
        range(sum([delta.token_count for delta in deltas])),  # what they are, nobody asks
        logprobs,
        finish_reason_from_proto(last.finish_reason) if last.finish_reason else None,
        getattr(last.matched_stop, stop) if stop else None,
        events,
    )


def usage_of(message: Any) -> Usage:
    """Return what a turn used."""
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.media_tokens,
        message.reasoning_tokens,
    )


def sampling_of(message: Any, asked: Mapping[str, Any]) -> Sampling:
    """Return how an answer is drawn; what was ``asked`` as it was: the contract has 32-bit floats.

    Raises:
        InvalidRequestError: it has a grammar that this version doesn't know.
    """
    found = {
        name: float(f"{value:.7g}") if isinstance(value, float) else value
        for name, value in sampling_fields(message, "sampling").items()
    }
    return Sampling(**{"max_new_tokens": 0, **found, **asked})


# ---- render, and the models ----------------------------------------------------------------------


def media_of(response: processor_pb2.RenderResponse) -> tuple[MediaInput, ...]:
    """Return a prompt's media, as far as it is told of them."""
    return tuple(
        MediaInput(
            modality=MODALITIES[place.modality],
            spans=tuple(Span(span.start, span.length) for span in place.spans),
            geometry=Geometry(),
            digest=place.digest,
        )
        for place in response.media
    )


def listed(model: processor_pb2.ServedModel) -> ListedModel:
    """Return a model as it is listed."""
    tasks = frozenset(_TASKS[task] for task in model.tasks if task in _TASKS)
    return ListedModel(
        name=model.name,
        aliases=list(model.aliases),
        context_length=model.context_length if tasks & _GENERATES else None,
        tasks=tasks,
    )


def image_defaults(models: Iterable[processor_pb2.ServedModel], name: str) -> ImageDefaults | None:
    """Return the defaults of the model that a request for images names; None: not known."""
    default = processor_pb2.MODEL_TASK_GENERATE_IMAGE
    for model in models:
        named = name in (model.name, *model.aliases) if name else default in model.default_of
        if named and model.HasField("diffusion"):
            info = model.diffusion
            return ImageDefaults(info.default_width, info.default_height, info.default_steps)
    return None
