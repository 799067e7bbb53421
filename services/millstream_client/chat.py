"""A Chat of one turn."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from millstream.v1 import processor_pb2
from millstream_client.connection import Connection
from millstream_client.conversation import Conversation
from millstream_client.going_on import can_go_on, go_on
from millstream_client.history import History, Turn
from millstream_client.request import Request
from millstream_client.service_config import SERVICE
from millstream_client.streams import AnswerStream
from millstream_client.tool_calls import ToolLimits
from millstream_client.tool_run import ToolRun
from millstream_client.writing import half_close, take_uploads, write, write_uploads


def ask(
    connection: Connection,
    history: History,
    turn: Turn,
    timeout_s: float | None,
    answer_type: Any = None,
) -> AnswerStream:
    """Prepare a Chat of one turn."""

    def goes_on() -> bool:
        return can_go_on(history.start(turn).start, request.answer)

    request = Request(connection, timeout_s, history.request_id, goes_on=goes_on)

    async def attempt() -> AsyncGenerator[Any, None]:
        await history.read(turn)
        request.check_not_ended()
        message = history.start(turn)
        if request.answer.begun:
            go_on(message.start, request.answer)
        uploads = take_uploads(message)
        if uploads:
            call = connection.begin(request, connection.stub.Chat)
        else:
            once = connection.with_one_message(f"/{SERVICE}/Chat", processor_pb2.ChatResponse)
            call = connection.begin(request, once, message)
        try:
            # If the stream ends while they are sent, reading raises its error.
            if uploads and await write_uploads(call, uploads) and await write(call, message):
                await half_close(call)
            async for response in call:
                request.answer.add(response)
                yield response
        finally:
            call.cancel()

    def run(_: AnswerStream, limits: ToolLimits) -> ToolRun:
        conversation = Conversation(connection, history)
        first = conversation.stream(turn, timeout_s, answer_type)
        return ToolRun(conversation, first, limits, timeout_s, owned=True)

    return AnswerStream(request, request.messages(attempt), run, answer_type)
