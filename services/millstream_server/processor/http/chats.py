"""A chat of any of the APIs: one turn of a new conversation, through the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.processor.answer_options import AnswerOptions
from millstream_server.processor.chat_requests import PreparedTurn
from millstream_server.processor.conversation import (
    Caller,
    Conversation,
    DrainNotice,
    Options,
    UserTurn,
)
from millstream_server.processor.http import schema
from millstream_server.processor.http.output import Events, Shape, Whole
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.output import PulledOutput
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc.http import EVENTS, HttpCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for."""

    model: str
    tools: Sequence[Tool]
    answers: AnswerOptions
    options: Options
    messages: tuple[ChatMessage, ...]
    field: str = "messages"
    """What the body calls them."""


def output_of(
    shape: Shape, asked: schema.Generation, call: HttpCall, *, is_part: bool = False
) -> Events | Whole:
    """Make the output that a body asks for; ``is_part``: see `joined_output`.

    Raises:
        InvalidRequestError: it asks for an option of events, and for none.
    """
    if not asked.stream:
        if asked.stream_options is not None:
            raise InvalidRequestError.of("stream_options", "needs stream")
        return Whole(shape, call.request_id, is_part=is_part)
    call.respond(EVENTS)
    given = asked.stream_options
    usage = bool(given and given.include_usage)
    return Events(shape, call.request_id, usage=usage, is_part=is_part)


async def run(pipeline: Pipeline, asked: Asked, output: PulledOutput, call: HttpCall) -> None:
    """Answer a chat; return when its last byte is on its way.

    Raises:
        ServingError: it was refused, or has failed.
    """
    with pipeline.chats.only_turn() as conversation:
        said = await _begin(conversation, asked, call)
        turn = await pipeline.chats.answer(conversation, said, Caller.of(call), call, output)
        tell_seed(turn.options, call)
        await pipeline.chats.send(turn, output, call)


async def prepare(pipeline: Pipeline, asked: Asked, call: HttpCall) -> PreparedTurn:
    """Return what a chat would send to a worker.

    Raises:
        ServingError: it would be refused.
    """
    with pipeline.chats.only_turn() as conversation:
        said = await _begin(conversation, asked, call)
        return await pipeline.chats.render(conversation, said, Caller.of(call))


def tell_seed(options: Options, call: HttpCall) -> None:
    """Say in a header if the workers can't keep the seed."""
    if options.seed_left_out:
        call.add_header("x-millstream-seed", "best-effort")


async def _begin(conversation: Conversation, asked: Asked, call: HttpCall) -> UserTurn:
    """Put what is asked for in a new conversation; return its turn."""
    if asked.answers.continues and "constraint" in asked.options.sampling:
        why = "can't be kept where the last message is the assistant's: the answer goes on in it"
        raise InvalidRequestError.of("sampling.constraint", why)
    conversation.model = asked.model
    conversation.request_id = call.request_id
    conversation.tools, conversation.answers = asked.tools, asked.answers
    conversation.add(UserTurn(asked.messages, asked.options, asked.field))
    said = await conversation.next_turn()
    if said is None or isinstance(said, DrainNotice):
        raise InvalidRequestError.of(asked.field, "are missing")
    return said
