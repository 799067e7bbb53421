"""A conversation: which turn a message belongs to, however messages and turns interleave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.conversation import MAX_WAITING_TURNS, Conversation, UserTurn
from millstream_server.processor.convert import begin, take_request
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.servicer import _read
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    Failure,
    InternalError,
    InvalidRequestError,
    UnavailableError,
)
from millstream_server.runtime.rpc.served_call import CallOverError
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from tests.support.processor.chats import CANCEL, message, start, tool_results, user_turn

POOL = WorkPool(PoolLimits())
"""Its threads are never started: nothing here is long."""


class Generation:
    """Stands for a running turn."""

    def __init__(self) -> None:
        self.cancels = 0
        self.error: Failure | None = None

    def cancel(self) -> None:
        self.cancels += 1

    def fail(self, error: Failure) -> None:
        self.error = error


async def _requests(*requests: processor_pb2.ChatRequest) -> AsyncIterator[Any]:
    for request in requests:
        yield request


def _no_uploads() -> Uploads:
    return Uploads(MediaBudget(0), 0)


async def _begun(work: OpenWork | None = None) -> Conversation:
    """A conversation whose first turn was taken and is prepared."""
    conversation = Conversation(_no_uploads, work or OpenWork())
    await begin(conversation, start("first").start, POOL)
    assert await conversation.next_turn() is not None
    return conversation


async def _say(conversation: Conversation, *requests: processor_pb2.ChatRequest) -> None:
    """Give it messages before any other task runs, as when they came in one packet."""
    for request in requests:
        await take_request(conversation, request, POOL)


def _run(conversation: Conversation) -> Generation:
    generation = Generation()
    conversation.runs(generation)
    return generation


def _end(conversation: Conversation) -> None:
    conversation.ended(ChatMessage(ChatRole.ASSISTANT, "an answer"), ())


async def test_turns_come_in_order_and_then_the_end() -> None:
    conversation = await _begun()
    result = message("42", chat_pb2.CHAT_ROLE_TOOL, tool_call_id="c")
    await _read(_requests(user_turn("a"), tool_results(result)), conversation, POOL)
    first, second = await conversation.next_turn(), await conversation.next_turn()
    assert isinstance(first, UserTurn)
    assert isinstance(second, UserTurn)
    assert [(m.role, m.text) for m in first.messages] == [(ChatRole.USER, "a")]
    assert [(m.role, m.text) for m in second.messages] == [(ChatRole.TOOL, "42")]
    assert await conversation.next_turn() is None


async def test_waiting_for_a_turn_that_comes_later() -> None:
    conversation = await _begun()
    waiting = asyncio.ensure_future(conversation.next_turn())
    await asyncio.sleep(0)
    await _say(conversation, user_turn("a"))
    assert await asyncio.wait_for(waiting, 5) is not None


# ---- cancel


async def test_a_cancel_reaches_the_running_turn() -> None:
    conversation = await _begun()
    generation = _run(conversation)
    await _say(conversation, CANCEL)
    assert generation.cancels == 1


async def test_a_cancel_while_a_turn_is_prepared_reaches_it_when_it_runs() -> None:
    conversation = await _begun()
    await _say(conversation, CANCEL)
    assert _run(conversation).cancels == 1


async def test_a_cancel_that_came_with_its_turn_reaches_it() -> None:
    conversation = await _begun()
    _run(conversation)
    _end(conversation)
    await _say(conversation, user_turn("a"), CANCEL)
    assert await conversation.next_turn() is not None
    assert _run(conversation).cancels == 1


async def test_a_cancel_is_spent_on_one_turn() -> None:
    conversation = await _begun()
    await _say(conversation, CANCEL)
    _run(conversation)
    _end(conversation)
    await _say(conversation, user_turn("a"))
    await conversation.next_turn()
    assert _run(conversation).cancels == 0


async def test_a_cancel_of_a_running_turn_spares_the_waiting_one() -> None:
    conversation = await _begun()
    first = _run(conversation)
    await _say(conversation, user_turn("a"), CANCEL)
    _end(conversation)
    await conversation.next_turn()
    assert (first.cancels, _run(conversation).cancels) == (1, 0)


async def test_a_cancel_between_turns_does_nothing() -> None:
    conversation = await _begun()
    _run(conversation)
    _end(conversation)
    await _say(conversation, CANCEL)
    await _say(conversation, user_turn("a"))
    await conversation.next_turn()
    assert _run(conversation).cancels == 0


# ---- shutdown


async def test_what_was_asked_for_before_the_server_refuses_is_answered_and_nothing_later() -> None:
    work = OpenWork()
    conversation = await _begun(work)
    await _say(conversation, user_turn("a"))
    work.refusing = True
    conversation.drain()
    await _say(conversation, user_turn("late"))
    turn = await conversation.next_turn()
    assert isinstance(turn, UserTurn)
    assert [message.text for message in turn.messages] == ["a"]
    with pytest.raises(UnavailableError, match="shutting down") as caught:
        await conversation.next_turn()
    assert caught.value.retry_delay_s is not None


async def test_a_late_turn_is_refused_although_the_client_has_closed() -> None:
    """Else its stream would end well, without an answer."""
    work = OpenWork()
    conversation = await _begun(work)
    work.refusing = True
    await _read(_requests(user_turn("late")), conversation, POOL)
    with pytest.raises(UnavailableError):
        await conversation.next_turn()


# ---- broken rules


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (start("a"), "start"),
        (processor_pb2.ChatRequest(), "message"),
        (processor_pb2.ChatRequest(user_turn=processor_pb2.UserTurn()), "user_turn.content"),
        (tool_results(), "tool_results.messages"),
        (tool_results(message("a")), "tool_results.messages[0].role"),
    ],
)
async def test_a_broken_rule_ends_the_running_turn_and_the_conversation(
    request_: processor_pb2.ChatRequest, field: str
) -> None:
    conversation = await _begun()
    generation = _run(conversation)
    await _read(_requests(user_turn("a"), request_, user_turn("b")), conversation, POOL)
    assert isinstance(generation.error, InvalidRequestError)
    assert generation.error.violations[0].field == field
    with pytest.raises(InvalidRequestError):
        await conversation.next_turn()


async def test_a_broken_rule_while_a_turn_is_prepared_ends_it_when_it_runs() -> None:
    conversation = await _begun()
    await _read(_requests(start("a")), conversation, POOL)
    assert isinstance(_run(conversation).error, InvalidRequestError)


async def test_a_bug_in_the_reader_ends_the_running_turn_and_the_conversation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Else the stream would end well, without the turn that could not be read."""
    conversation = await _begun()
    generation = _run(conversation)
    not_a_message: Any = object()
    await _read(_requests(not_a_message, user_turn("b")), conversation, POOL)
    assert isinstance(generation.error, InternalError)
    assert "a message can't be read" in caplog.text
    with pytest.raises(InternalError):
        await conversation.next_turn()


async def test_a_reader_whose_client_has_left_reports_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def left() -> AsyncIterator[Any]:
        raise CallOverError
        yield

    conversation = await _begun()
    generation = _run(conversation)
    await _read(left(), conversation, POOL)
    assert generation.error is None
    assert not caplog.text
    assert await conversation.next_turn() is None


async def test_so_many_turns_may_wait_and_no_more() -> None:
    conversation = await _begun()
    await _read(_requests(*(user_turn("a") for _ in range(MAX_WAITING_TURNS))), conversation, POOL)
    assert await conversation.next_turn() is not None
    full = await _begun()
    await _read(_requests(*(user_turn("a") for _ in range(MAX_WAITING_TURNS + 1))), full, POOL)
    with pytest.raises(InvalidRequestError):
        await full.next_turn()
