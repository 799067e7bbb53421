"""A Chat stream's inbox: which turn a message belongs to, however messages and turns interleave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from millstream.v1 import chat_pb2, processor_pb2
from millstream_server.processor.conversation import MAX_WAITING_TURNS, Inbox
from millstream_server.processor.text.messages import ChatRole
from millstream_server.runtime.errors import InvalidRequestError, ServingError, UnavailableError
from tests.support.chats import CANCEL, message, start, tool_results, user_turn


class Generation:
    """Stands for a running turn."""

    def __init__(self) -> None:
        self.cancels = 0
        self.error: ServingError | None = None

    def cancel(self) -> None:
        self.cancels += 1

    def fail(self, error: ServingError) -> None:
        self.error = error


async def _requests(*requests: processor_pb2.ChatRequest) -> AsyncIterator[Any]:
    for request in requests:
        yield request


async def _take(inbox: Inbox, *requests: processor_pb2.ChatRequest) -> None:
    """Let the inbox take messages in before anybody else runs, as when they came in one packet."""
    for request in requests:
        inbox._take(request)


def _run(inbox: Inbox) -> Generation:
    generation: Any = Generation()
    inbox.running(generation)
    running: Generation = generation
    return running


async def test_turns_come_in_order_and_then_the_end() -> None:
    inbox = Inbox()
    result = message("42", chat_pb2.ROLE_TOOL, tool_call_id="c")
    await inbox.read(_requests(user_turn("a"), tool_results(result)))
    first, second = await inbox.next_turn(), await inbox.next_turn()
    assert first is not None
    assert second is not None
    assert [(m.role, m.text) for m in first.messages] == [(ChatRole.USER, "a")]
    assert [(m.role, m.text) for m in second.messages] == [(ChatRole.TOOL, "42")]
    assert await inbox.next_turn() is None


async def test_waiting_for_a_turn_that_comes_later() -> None:
    inbox = Inbox()
    waiting = asyncio.ensure_future(inbox.next_turn())
    await asyncio.sleep(0)
    await _take(inbox, user_turn("a"))
    assert await asyncio.wait_for(waiting, 5) is not None


# ---- cancel


async def test_a_cancel_reaches_the_running_turn() -> None:
    inbox = Inbox()
    generation = _run(inbox)
    await _take(inbox, CANCEL)
    assert generation.cancels == 1


async def test_a_cancel_while_a_turn_is_prepared_reaches_it_when_it_runs() -> None:
    inbox = Inbox()
    await _take(inbox, CANCEL)
    assert _run(inbox).cancels == 1


async def test_a_cancel_that_came_with_its_turn_reaches_it() -> None:
    inbox = Inbox()
    _run(inbox)
    inbox.ended()
    await _take(inbox, user_turn("a"), CANCEL)
    assert await inbox.next_turn() is not None
    assert _run(inbox).cancels == 1


async def test_a_cancel_is_spent_on_one_turn() -> None:
    inbox = Inbox()
    await _take(inbox, CANCEL)
    _run(inbox)
    inbox.ended()
    await _take(inbox, user_turn("a"))
    await inbox.next_turn()
    assert _run(inbox).cancels == 0


async def test_a_cancel_of_a_running_turn_spares_the_waiting_one() -> None:
    inbox = Inbox()
    first = _run(inbox)
    await _take(inbox, user_turn("a"), CANCEL)
    inbox.ended()
    await inbox.next_turn()
    assert (first.cancels, _run(inbox).cancels) == (1, 0)


async def test_a_cancel_between_turns_does_nothing() -> None:
    inbox = Inbox()
    _run(inbox)
    inbox.ended()
    await _take(inbox, CANCEL)
    await _take(inbox, user_turn("a"))
    await inbox.next_turn()
    assert _run(inbox).cancels == 0


# ---- shutdown


async def test_what_was_asked_for_before_the_server_refuses_is_answered_and_nothing_later() -> None:
    refusing = False
    inbox = Inbox(lambda: refusing)
    await _take(inbox, user_turn("a"))
    refusing = True
    inbox.drain()
    await _take(inbox, user_turn("late"))
    turn = await inbox.next_turn()
    assert turn is not None
    assert [message.text for message in turn.messages] == ["a"]
    with pytest.raises(UnavailableError, match="shutting down") as caught:
        await inbox.next_turn()
    assert caught.value.retry_delay_s is not None


async def test_a_late_turn_is_refused_although_the_client_has_closed() -> None:
    """Else its stream would end well, without an answer."""
    inbox = Inbox(lambda: True)
    await inbox.read(_requests(user_turn("late")))
    with pytest.raises(UnavailableError):
        await inbox.next_turn()


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
    inbox = Inbox()
    generation = _run(inbox)
    await inbox.read(_requests(user_turn("a"), request_, user_turn("b")))
    assert isinstance(generation.error, InvalidRequestError)
    assert generation.error.violations[0].field == field
    with pytest.raises(InvalidRequestError):
        await inbox.next_turn()


async def test_a_broken_rule_while_a_turn_is_prepared_ends_it_when_it_runs() -> None:
    inbox = Inbox()
    await inbox.read(_requests(start("a")))
    assert isinstance(_run(inbox).error, InvalidRequestError)


async def test_so_many_turns_may_wait_and_no_more() -> None:
    inbox = Inbox()
    await inbox.read(_requests(*(user_turn("a") for _ in range(MAX_WAITING_TURNS))))
    assert await inbox.next_turn() is not None
    full = Inbox()
    await full.read(_requests(*(user_turn("a") for _ in range(MAX_WAITING_TURNS + 1))))
    with pytest.raises(InvalidRequestError):
        await full.next_turn()
