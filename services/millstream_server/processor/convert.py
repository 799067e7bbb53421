"""Conversion between the Processor's messages and plain types. No side effects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import Message

from millstream.v1 import (
    chat_pb2,
    diffusion_pb2,
    embedding_pb2,
    media_pb2,
    processor_pb2,
)
from millstream_server.control.engine import Task
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.wire import diffusion_model_to_proto
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.embedding.wire import embedding_model_to_proto
from millstream_server.generation import wire as from_worker
from millstream_server.media.items import Modality
from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.conversation import Completion, Conversation, Options, UserTurn
from millstream_server.processor.convert_answers import answers_from_proto, switches_from_proto
from millstream_server.processor.models import ModelStatus
from millstream_server.processor.text.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    ChatMessage,
    ChatRole,
    ConversationPaths,
    MediaPart,
    Tool,
    ToolCall,
)
from millstream_server.processor.texts import UntokenizedChat
from millstream_server.protobuf.common import PRIORITIES, ROLES_TO_PROTO
from millstream_server.protobuf.media import MODALITIES_TO_PROTO
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.request_id import new_request_id
from millstream_server.runtime.work.pool import WorkPool
from millstream_server.worker_info import abilities_to_proto

_ROLES = {
    chat_pb2.CHAT_ROLE_SYSTEM: ChatRole.SYSTEM,
    chat_pb2.CHAT_ROLE_DEVELOPER: ChatRole.DEVELOPER,
    chat_pb2.CHAT_ROLE_USER: ChatRole.USER,
    chat_pb2.CHAT_ROLE_ASSISTANT: ChatRole.ASSISTANT,
    chat_pb2.CHAT_ROLE_TOOL: ChatRole.TOOL,
}
_TASKS = {task: processor_pb2.ModelTask.Value(f"MODEL_TASK_{task.name}") for task in Task}
SAME_NAME = frozenset(
    ("n", "return_token_ids", "include_special_tokens", "adapter", "session", "cache_salt")
)
"""Options whose field has the same name and value here."""
_IN_SLOTS = (
    diffusion_pb2.GenerateTextRequest,
    diffusion_pb2.GenerateImageRequest,
    diffusion_pb2.GenerateVideoRequest,
    embedding_pb2.EmbedRequest,
)

MAX_TOOLS = 1024
_SHORT_PARTS = 1024
"""And messages: converted in a millisecond, which is less than a thread's turn takes."""
_SECONDS_PER_PART = 2e-6


# ---- what the client sends -----------------------------------------------------------------------


async def begin(conversation: Conversation, start: processor_pb2.ChatStart, pool: WorkPool) -> None:
    """Begin a conversation, and add its first turn; long messages are converted in the ``pool``.

    Raises:
        ServingError: a part of it can't be read.
    """
    conversation.model = start.model
    conversation.request_id = start.request_id or new_request_id()
    conversation.tools = tools_from_proto(start.tools, "start.tools")
    conversation.answers = answers_from_proto(start)
    messages = await _messages(start.messages, "start.messages", pool)
    options = options_from_proto(start.options, "start.options.")
    conversation.add(UserTurn(tuple(messages), options, "start.messages"))


async def take_request(
    conversation: Conversation, request: processor_pb2.ChatRequest, pool: WorkPool
) -> None:
    """Pass a later message to its conversation; a long one is converted in the ``pool``.

    Raises:
        ServingError: it breaks the conversation's rules.
    """
    kind = request.WhichOneof("message")
    if kind == "cancel":
        cancel = request.cancel
        conversation.cancel(cancel.turn if cancel.HasField("turn") else None)
    elif kind == "user_turn":
        said, parts = request.user_turn, len(request.user_turn.content)
        work = partial(_user_turn, said)
        short = parts <= _SHORT_PARTS
        conversation.add(work() if short else await pool.run(work, parts * _SECONDS_PER_PART))
    elif kind == "tool_results":
        conversation.add(await _tool_results(request.tool_results, pool))
    elif kind == "media_chunk":
        take_chunk(conversation, request.media_chunk)
    elif kind == "start":
        raise InvalidRequestError.of("start", "the conversation has started already")
    else:
        raise InvalidRequestError.of(
            "message", "set one of start, user_turn, tool_results, cancel, media_chunk"
        )


def take_chunk(conversation: Conversation, chunk: media_pb2.MediaChunk) -> None:
    """Take in a piece of a file.

    Raises:
        ServingError: it breaks the rules of uploads, or there is no memory for it.
    """
    conversation.uploads.add(chunk.upload_id, chunk.data, chunk.total_bytes)


def held_bytes(message: Message) -> int:
    """Return the bytes of a client's message that are held until its RPC ends.

    Those of files in chunks count in the `MediaBudget`, and must not keep others' text out. Those
    of requests in slots count until the request ends, since a stream may outlive many: in
    `Front.hold` or, token ids, in the `AdmissionQueue`.
    """
    if isinstance(message, processor_pb2.ChatRequest):
        uncounted = message.HasField("media_chunk")
    else:
        uncounted = isinstance(message, _IN_SLOTS)
    return 0 if uncounted else message.ByteSize()


def _user_turn(message: processor_pb2.UserTurn) -> UserTurn:
    field = "user_turn.content"
    if not message.content:
        raise InvalidRequestError.of(field, "must not be empty")
    if len(message.content) > MAX_PARTS:
        raise InvalidRequestError.of(field, f"at most {MAX_PARTS} parts")
    text, parts = _content(message.content, "user_turn", with_media=True)
    return UserTurn(
        (ChatMessage(ChatRole.USER, text, field="user_turn", parts=parts),),
        options_from_proto(message.options, "user_turn.options.")
        if message.HasField("options")
        else None,
        field,
    )


async def _tool_results(message: processor_pb2.ToolResults, pool: WorkPool) -> UserTurn:
    field = "tool_results.messages"
    if not message.messages:
        raise InvalidRequestError.of(field, "must not be empty")
    messages = await _messages(message.messages, field, pool)
    for result in messages:
        if result.role is not ChatRole.TOOL:
            raise InvalidRequestError.of(f"{result.field}.role", "must be CHAT_ROLE_TOOL")
    return UserTurn(tuple(messages), None, field, has_results=True)


async def _messages(
    messages: Sequence[chat_pb2.ChatMessage],
    field: str,
    pool: WorkPool,
    *,
    with_media: bool = True,
) -> list[ChatMessage]:
    """Convert messages; ``field`` is their path.

    Raises:
        ServingError: there are too many, or a part of one can't be read.
    """
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError.of(field, f"at most {MAX_MESSAGES} messages")
    try:
        return _messages_from_proto(messages, field, _SHORT_PARTS, with_media=with_media)
    except _LongError:
        parts = sum([1 + len(said.content) + len(said.tool_calls) for said in messages])
    work = partial(_messages_from_proto, messages, field, MAX_PARTS * 2, with_media=with_media)
    return await pool.run(work, parts * _SECONDS_PER_PART)


class _LongError(Exception):
    """Messages have so many parts that they are converted in the pool."""


def _messages_from_proto(
    messages: Sequence[chat_pb2.ChatMessage], field: str, most: int, *, with_media: bool
) -> list[ChatMessage]:
    found, count = [], 0
    for index, message in enumerate(messages):
        content, calls = message.content, message.tool_calls
        count += len(content) + len(calls)
        if count > MAX_PARTS:
            raise InvalidRequestError.of(field, f"at most {MAX_PARTS} content parts and tool calls")
        if index + count > most:
            raise _LongError
        path = f"{field}[{index}]"
        text, parts = _content(content, path, with_media=with_media)
        found.append(
            ChatMessage(
                _ROLES.get(message.role),  # an unknown role becomes None, which is refused later
                text,
                tuple(ToolCall(c.id, c.name, c.arguments_json) for c in calls) if calls else (),
                message.tool_call_id,
                message.name,
                path,
                parts,
                message.reasoning,
            )
        )
    return found


def _content(
    parts: Sequence[chat_pb2.ContentPart], field: str, *, with_media: bool
) -> tuple[str, tuple[str | MediaPart, ...]]:
    """Return the text of a message at the path ``field``, and its parts in order if it has media.

    Raises:
        ServingError: a part is of an unknown kind, or its media can't be taken.
    """
    if len(parts) == 1:
        part = parts[0]
        if part.WhichOneof("part") == "text":
            return part.text, ()
    kinds = [part.WhichOneof("part") for part in parts]
    if None in kinds:
        raise InvalidRequestError.of(
            f"{field}.content[{kinds.index(None)}]",
            "set one of text, image, video; this server knows no other kind of content",
        )
    text = "".join(part.text for part in parts)
    if kinds.count("text") == len(kinds):
        return text, ()
    return text, tuple(
        part.text
        if kind == "text"
        else _media_part(part, f"{field}.content[{index}]", with_media=with_media)
        for index, (part, kind) in enumerate(zip(parts, kinds, strict=True))
    )


def _media_part(part: chat_pb2.ContentPart, field: str, *, with_media: bool) -> MediaPart:
    modality = Modality(part.WhichOneof("part"))
    media: media_pb2.Media = getattr(part, modality.value)
    field = f"{field}.{modality.value}"
    if not with_media:
        raise UnsupportedFeatureError.of(field, "this method takes text only; use Chat")
    source = media.WhichOneof("source")
    if source == "data":
        return MediaPart(modality, f"{field}.data", data=media.data)
    if source == "upload_id":
        return MediaPart(modality, f"{field}.upload_id", upload_id=media.upload_id)
    if source == "url":
        return MediaPart(modality, f"{field}.url", url=media.url)
    raise InvalidRequestError.of(field, "set one of data, upload_id, url")


def tools_from_proto(tools: Sequence[chat_pb2.ChatTool], field: str) -> list[Tool]:
    """Convert tools; ``field`` is their path.

    Raises:
        InvalidRequestError: there are too many; none was converted.
    """
    if len(tools) > MAX_TOOLS:
        raise InvalidRequestError.of(field, f"at most {MAX_TOOLS} tools")
    return [
        Tool(tool.name, tool.description, tool.parameters_json_schema, tool.strict)
        for tool in tools
    ]


async def untokenized_from_proto(
    request: processor_pb2.TokenizeRequest, pool: WorkPool
) -> UntokenizedChat:
    """Convert a conversation to be tokenized; long messages in the ``pool``.

    Raises:
        InvalidRequestError: a part of it can't be read.
    """
    conversation = request.conversation
    continues = "conversation.continue_final_message" if conversation.continue_final_message else ""
    paths = ConversationPaths("conversation.messages", "conversation.tools", continues)
    return UntokenizedChat(
        model=request.model,
        messages=await _messages(conversation.messages, paths.messages, pool, with_media=False),
        tools=tools_from_proto(conversation.tools, paths.tools),
        answers=AnswerOptions(
            switches=switches_from_proto(conversation.reasoning, "conversation.reasoning"),
        ),
        paths=paths,
    )


def options_from_proto(options: processor_pb2.GenerationOptions, path: str) -> Options:
    """Convert options; ``path`` is their message's.

    Raises:
        InvalidRequestError: a part of them can't be read.
    """
    given: dict[str, Any] = {}
    sampling: Mapping[str, Any] = {}
    for field, value in options.ListFields():  # few are set, and each look at one costs
        name = field.name
        if name == "sampling":
            sampling = from_worker.sampling_fields(value, f"{path}sampling")
        elif name in SAME_NAME:
            given[name] = value
        elif name == "logprobs":
            given[name] = from_worker.logprob_options_from_proto(options)
        elif name == "priority":
            given[name] = PRIORITIES.get(value)
        elif name == "stop":
            given["stops"] = tuple(value)
        elif name == "min_interval":
            given["min_interval_s"] = value.ToNanoseconds() / 1e9
    return Options(path=path, sampling=sampling, **given)


def completion_from_proto(request: processor_pb2.CompleteRequest) -> Completion:
    """Convert a raw prompt and its options.

    Raises:
        InvalidRequestError: a part of it can't be read.
    """
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError.of("prompt", "set one of text, token_ids")
    return Completion(
        model=request.model,
        request_id=request.request_id or new_request_id(),
        prompt=request.text if kind == "text" else request.token_ids.ids[:],
        options=options_from_proto(request.options, "options."),
    )


# ---- the served models ---------------------------------------------------------------------------


def model_to_proto(model: ModelStatus) -> processor_pb2.ServedModel:
    """Convert a served model; of several workers for images or vectors, the first one's info."""
    message = processor_pb2.ServedModel(
        name=model.name,
        ready=model.ready,
        context_length=_context_length(model),
        workers=[
            processor_pb2.ModelWorkers(role=ROLES_TO_PROTO[role], connected=count)
            for role, count in sorted(model.workers.items(), key=lambda item: item[0].value)
        ],
        chat=model.text is not None and model.text.chat_template.available,
        modalities=sorted(MODALITIES_TO_PROTO[modality] for modality in model.modalities),
        tasks=sorted(_TASKS[task] for task in model.tasks),
        abilities=abilities_to_proto(model.engine.abilities) if model.engine else (),
        adapters=sorted(model.engine.adapter_names()) if model.engine else (),
        aliases=model.aliases,
        default_of=sorted(_TASKS[task] for task in model.default_of),
    )
    if model.text is not None:
        message.text_files.tokenizer = model.text.tokenizer_source
        message.text_files.chat_template = model.text.template_source
    if model.answer_format is not None:
        message.answer_format.name = model.answer_format.form.name
        message.answer_format.reason = model.answer_format.reason
    for info in reversed(model.others):
        if isinstance(info, DiffuserInfo):
            message.diffusion.CopyFrom(diffusion_model_to_proto(info))
        elif isinstance(info, EmbedderInfo):
            message.embedding.CopyFrom(embedding_model_to_proto(info))
    return message


def _context_length(model: ModelStatus) -> int:
    if model.engine is not None:
        return model.engine.context_length
    return (model.text.context_length if model.text else None) or 0
