"""A chat of any of the APIs: one turn of a new conversation, through the pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.output import PulledOutput
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.processor.turn import Turn
from millstream_server.runtime.errors import InvalidRequestError, ServingError
from millstream_server.runtime.rpc.http import HttpCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for."""

    model: str
    tools: Sequence[Tool]
    answers: AnswerOptions
    options: Options
    messages: Callable[[Conversation], tuple[ChatMessage, ...]]
    """Converts the messages; files in them count as held by the conversation."""
    field: str = "messages"
    """What the body calls them."""


async def run(core: ProcessorCore, asked: Asked, output: PulledOutput, call: HttpCall) -> None:
    """Answer a chat; return when its last byte is on its way.

    Raises:
        ServingError: it was refused, or has failed.
    """
    conversation = Conversation(core.media.uploads, core.work)
    try:
        with core.front.call():
            said = await _begin(conversation, asked, call)
            turn = await core.answer(conversation, said, Caller.of(call), call, output)
            await send(core, turn, output, call)
    finally:
        conversation.close()


async def prepare(core: ProcessorCore, asked: Asked, call: HttpCall) -> PreparedTurn:
    """Return what a chat would send to a worker.

    Raises:
        ServingError: it would be refused.
    """
    conversation = Conversation(core.media.uploads, core.work)
    try:
        with core.front.call():
            said = await _begin(conversation, asked, call)
            return await core.render(conversation, said, Caller.of(call))
    finally:
        conversation.close()


async def _begin(conversation: Conversation, asked: Asked, call: HttpCall) -> UserTurn:
    """Put what is asked for in a new conversation; return its turn."""
    conversation.model = asked.model
    conversation.request_id = call.request_id
    conversation.tools, conversation.answers = asked.tools, asked.answers
    messages = asked.messages(conversation)
    conversation.add(UserTurn(messages, asked.options, asked.field))
    said = await conversation.next_turn()
    if said is None or isinstance(said, DrainNotice):
        raise InvalidRequestError.of(asked.field, "are missing")
    return said


async def send(core: ProcessorCore, turn: Turn, output: PulledOutput, call: HttpCall) -> None:
    """Send the output of a turn that has started, to its end."""
    try:
        await call.send_from(output)
    finally:
        core.end(turn)


def is_read(core: ProcessorCore, model: str, *, told_tools: bool, constrained: bool) -> bool:
    """Whether reasoning, text and calls are to be told apart in the answer.

    Not where it can have one of them only: of JSON that a grammar makes from the first token on
    (``constrained``), and of models that write text alone.
    """
    if told_tools:
        return True
    if constrained:
        return False
    with contextlib.suppress(ServingError):  # the turn will say it
        form = core.models.served(model).answer_format
        return form is not None and bool(form.form.reasoning)
    return False
