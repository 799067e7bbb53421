"""The server's side of a slot stream: ends, cancels, slow readers, drains, bugs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    InvalidRequestError,
    OverloadedError,
    ServingError,
)
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    Output,
    SlotContent,
    SlotSession,
    StartSlot,
)
from millstream_server.runtime.rpc.slots import MAX_SLOT
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_testing.waiting import until

MIB = 1 << 20
Content = SlotContent[str, str]


class Message(Content):
    """A message that is as large as the texts in it."""

    def ByteSize(self) -> int:
        """Return its size."""
        texts = [text for part in (self.latest, self.entries, self.finished) for _, text in part]
        return sum(map(len, texts + [error.message for _, error in self.errors]))


Run = Callable[[Output[str]], Awaitable[str]]


@dataclass
class Request:
    """What a test runs."""

    run: Run
    deadline_s: float | None = None


class Service:
    """Messages are (slot, request), (slot, error of its conversion) or a slot to cancel."""

    def __init__(self) -> None:
        self.work = OpenWork()
        self.streams = OpenWork()
        self.begun = 0
        """Requests that have begun."""

    def control(self, message: Any) -> StartSlot[Request] | CancelSlot:
        if message is None:
            raise InvalidRequestError.of("control", "is required")
        if isinstance(message, int):
            return CancelSlot(message)
        slot, what = message

        def read(_: TraceContext) -> Request:
            if isinstance(what, Exception):
                raise what
            return what if isinstance(what, Request) else Request(what)

        return StartSlot(slot, read)

    async def run(self, request: Request, output: Output[str]) -> str:
        self.begun += 1
        with self.work.track():
            return await request.run(output)

    def response(self, content: Content) -> Message:
        return Message(
            content.latest, content.entries, content.finished, content.errors, content.draining
        )


@dataclass
class Caller:
    """One stream: what it sends, and what it got."""

    service: Service = field(default_factory=Service)
    stall_limit_s: float = 20.0
    messages: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    got: list[Message] = field(default_factory=list)
    read: int = 0
    """Messages that the session has taken."""
    may_read: asyncio.Event = field(default_factory=asyncio.Event)
    failed: BaseException | None = None
    task: asyncio.Task[None] | None = None

    async def _sent(self) -> AsyncIterator[Any]:
        while (message := await self.messages.get()) is not _END:
            self.read += 1
            yield message

    async def _run(self) -> None:
        session: SlotSession[Any, Request, str, str, Message] = SlotSession(
            self.service, stall_limit_s=self.stall_limit_s
        )
        try:
            async with contextlib.aclosing(session.responses(self._sent())) as responses:
                async for response in responses:
                    self.got.append(response)
                    await self.may_read.wait()
        except ServingError as error:
            self.failed = error

    def open(self) -> None:
        self.may_read.set()
        self.task = asyncio.ensure_future(self._run())

    def send(self, message: Any) -> None:
        self.messages.put_nowait(message)

    def entries(self, slot: int) -> list[str]:
        return [entry for content in self.got for at, entry in content.entries if at == slot]

    def ends(self, slot: int) -> list[Any]:
        """The slot's ends: results, or failures' reasons."""
        return [
            *(end for content in self.got for at, end in content.finished if at == slot),
            *(error.reason for content in self.got for at, error in content.errors if at == slot),
        ]

    async def end(self, slot: int) -> Any:
        await until(lambda: bool(self.ends(slot)))
        (end,) = self.ends(slot)
        return end


_END = object()


@pytest.fixture
async def caller() -> AsyncIterator[Caller]:
    made = Caller()
    made.open()
    yield made
    await _close(made)
    assert made.service.streams.count == 0


async def _close(caller: Caller) -> None:
    assert caller.task is not None
    caller.may_read.set()
    caller.task.cancel()
    await asyncio.wait({caller.task})
    await until(lambda: caller.service.work.count == 0)


async def _forever(_: Output[str]) -> str:
    await asyncio.Event().wait()
    return "never"


def _sends(*entries: str, nbytes: int = 1) -> Run:
    async def run(output: Output[str]) -> str:
        for entry in entries:
            await output.put(entry, nbytes)
        return "done"

    return run


async def _quick(_: Output[str]) -> str:
    return "quick"


async def test_a_request_gets_its_entries_in_order_and_one_end(caller: Caller) -> None:
    caller.send((7, _sends("a", "b", "c")))
    assert await caller.end(7) == "done"
    assert caller.entries(7) == ["a", "b", "c"]
    caller.send((7, _sends("d")))  # the slot is free again
    await until(lambda: caller.ends(7) == ["done", "done"])
    caller.send(_END)
    assert caller.task is not None
    await caller.task
    assert caller.failed is None


async def test_requests_end_after_the_caller_has_closed_its_side(caller: Caller) -> None:
    going = asyncio.Event()

    async def waits(_: Output[str]) -> str:
        await going.wait()
        return "late"

    caller.send((1, waits))
    caller.send(_END)
    await until(lambda: caller.service.work.count == 1)
    going.set()
    assert await caller.end(1) == "late"
    assert caller.task is not None
    await caller.task


async def test_a_cancel_ends_a_request_with_its_reason_once(caller: Caller) -> None:
    seen: list[ServingError | None] = []

    async def told(output: Output[str]) -> str:
        try:
            return await _forever(output)
        finally:
            seen.append(output.stopped)

    caller.send((1, told))
    caller.send((2, _quick))
    await caller.end(2)
    caller.send(1)
    caller.send(1)
    caller.send(99)  # no such slot: no effect
    assert await caller.end(1) == "CANCELLED"
    assert [error.reason for error in seen if error] == ["CANCELLED"]
    caller.send((3, _quick))
    await caller.end(3)
    assert caller.ends(1) == ["CANCELLED"]


async def test_a_request_that_ends_as_it_is_cancelled_ends_as_it_did(caller: Caller) -> None:
    async def stubborn(output: Output[str]) -> str:
        try:
            return await _forever(output)
        except asyncio.CancelledError:
            return "done all the same"

    caller.send((1, stubborn))
    await until(lambda: caller.service.work.count == 1)
    caller.send(1)
    assert await caller.end(1) == "done all the same"


async def test_a_deadline_ends_a_request_and_one_that_has_passed_starts_none(
    caller: Caller,
) -> None:
    caller.send((1, Request(_forever, time.monotonic() + 0.05)))
    caller.send((2, Request(_quick, time.monotonic() - 1)))
    caller.send((3, Request(_quick, time.monotonic() + 100)))
    assert await caller.end(1) == "DEADLINE_EXCEEDED"
    assert await caller.end(2) == "DEADLINE_EXCEEDED"
    assert await caller.end(3) == "quick"


async def test_a_failure_and_a_bug_end_their_request_only(caller: Caller) -> None:
    async def fails(_: Output[str]) -> str:
        raise OverloadedError("busy")

    async def broken(_: Output[str]) -> str:
        raise ZeroDivisionError

    caller.send((1, fails))
    caller.send((2, broken))
    caller.send((3, InvalidRequestError.of("x", "is bad")))
    caller.send((4, ZeroDivisionError()))
    caller.send((5, _quick))
    assert [await caller.end(slot) for slot in range(1, 6)] == [
        "OVERLOADED",
        "INTERNAL",
        "INVALID_REQUEST",
        "INTERNAL",
        "quick",
    ]
    internal = [e for c in caller.got for at, e in c.errors if at in {2, 4}]
    assert all(error.error_id and "Zero" not in error.message for error in internal)


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([(1, _forever), (1, _quick)], "start.slot: 1 is in use"),
        ([(MAX_SLOT, _quick)], f"must be below {MAX_SLOT}"),
        ([(1, _forever), None], "control: is required"),
    ],
)
async def test_a_broken_rule_ends_the_stream_and_all_its_requests(
    caller: Caller, messages: list[Any], says: str
) -> None:
    for message in messages:
        caller.send(message)
    assert caller.task is not None
    await caller.task
    assert isinstance(caller.failed, InvalidRequestError)
    assert says in caller.failed.message
    await until(lambda: caller.service.work.count == 0)


async def test_a_caller_that_goes_away_stops_its_requests(caller: Caller) -> None:
    caller.send((1, _forever))
    await until(lambda: caller.service.work.count == 1)
    await _close(caller)


async def test_only_the_newest_of_the_latest_entries_is_sent_and_none_after_the_end(
    caller: Caller,
) -> None:
    going = asyncio.Event()

    async def reports(output: Output[str]) -> str:
        output.latest("1")
        await until(lambda: len(caller.got) == 1)
        output.latest("2")
        output.latest("3")
        await going.wait()
        output.latest("4")
        await until(lambda: len(caller.got) == 3)
        output.latest("5")  # the caller doesn't read before the end
        return "done"

    caller.may_read.clear()
    caller.send((1, reports))
    await until(lambda: len(caller.got) == 1)
    caller.may_read.set()
    await until(lambda: len(caller.got) == 2)
    caller.may_read.clear()
    going.set()
    await until(lambda: len(caller.got) == 3)
    await until(lambda: caller.service.work.count == 0)
    caller.may_read.set()
    assert await caller.end(1) == "done"
    latest = [entry for content in caller.got for _, entry in content.latest]
    assert latest == ["1", "3", "4"]


async def test_a_slow_reader_bounds_what_is_kept_and_stalls_nobody_else(caller: Caller) -> None:
    service = caller.service
    other = Caller(service)
    other.open()
    put: list[str] = []

    async def large(output: Output[str]) -> str:
        for n in range(20):
            await output.put(str(n), MIB)
            put.append(str(n))
        return "done"

    caller.may_read.clear()
    caller.send((1, large))
    caller.send((2, _quick))
    await until(lambda: bool(caller.got))
    other.send((1, _sends(*"abc", nbytes=MIB)))
    assert await other.end(1) == "done"
    assert len(put) < 6
    caller.may_read.set()
    assert await caller.end(1) == "done"
    assert await caller.end(2) == "quick"
    assert caller.entries(1) == [str(n) for n in range(20)]
    assert all(len(content.entries) <= 2 for content in caller.got)
    await _close(other)


async def test_those_who_wait_for_a_slow_reader_go_on_in_turn(caller: Caller) -> None:
    caller.may_read.clear()
    for slot in range(4):
        caller.send((slot, _sends(*"abcd", nbytes=MIB)))
    await until(lambda: bool(caller.got))
    caller.may_read.set()
    for slot in range(4):
        await caller.end(slot)
    order = [slot for content in caller.got for slot, _ in content.entries]
    first = [order.index(slot) for slot in range(4)]
    assert max(first) < 8, order  # nobody had all of his entries sent before another's first


async def test_a_caller_that_reads_nothing_for_long_fails_the_requests_that_wait() -> None:
    caller = Caller(stall_limit_s=0.1)
    caller.open()
    caller.may_read.clear()
    caller.send((1, _sends(*"abcdefgh", nbytes=MIB)))
    caller.send((2, _sends(*"abcdefgh", nbytes=MIB)))
    caller.send((3, _quick))
    await until(lambda: caller.service.begun == 3 and caller.service.work.count == 0)
    caller.may_read.set()
    assert await caller.end(1) == "UNAVAILABLE"
    assert await caller.end(2) == "UNAVAILABLE"
    assert await caller.end(3) == "quick"
    await _close(caller)


async def test_a_storm_of_starts_while_nobody_reads_is_bounded(caller: Caller) -> None:
    caller.may_read.clear()
    for slot in range(20_000):
        caller.send((slot, InvalidRequestError.of("x", "is bad")))
    await until(lambda: caller.read > 4000)
    for _ in range(100):
        await asyncio.sleep(0)
    assert caller.read < 10_000
    caller.may_read.set()
    await until(lambda: caller.read == 20_000)
    await caller.end(19_999)


async def test_too_many_open_requests_on_one_stream_are_refused(caller: Caller) -> None:
    for slot in range(4097):
        caller.send((slot, _forever))
    assert await caller.end(4096) == "OVERLOADED"
    caller.send(0)
    assert await caller.end(0) == "CANCELLED"
    caller.send((0, _quick))
    await until(lambda: caller.ends(0) == ["quick", "CANCELLED"])


async def test_a_drain_is_announced_and_what_is_open_may_end(caller: Caller) -> None:
    going = asyncio.Event()

    async def waits(_: Output[str]) -> str:
        await going.wait()
        return "late"

    caller.send((1, waits))
    await until(lambda: caller.service.work.count == 1)
    draining = asyncio.ensure_future(caller.service.work.drain(0, 20))
    await until(lambda: any(content.draining for content in caller.got))
    caller.send((2, _quick))  # the caller may not have read the notice yet
    assert await caller.end(2) == "quick"
    late = Caller(caller.service)
    late.open()
    await until(lambda: any(content.draining for content in late.got))
    late.send((1, _quick))
    assert await late.end(1) == "WORKER_DRAINING"
    going.set()
    assert await caller.end(1) == "late"
    assert await draining
    assert sum(content.draining for content in caller.got) == 1
    await _close(late)


async def test_no_message_is_too_large_for_a_caller_that_reads_late(caller: Caller) -> None:
    async def shows(output: Output[str]) -> str:
        output.latest("p" * MIB)
        return await _forever(output)

    caller.may_read.clear()
    for slot in range(8):
        caller.send((slot, shows))
    await until(lambda: caller.service.work.count == 8)
    for slot in range(10, 3010):
        caller.send((slot, InvalidRequestError("x" * 2000)))
    await until(lambda: caller.read == 3008)
    caller.may_read.set()
    await caller.end(3009)
    assert max(message.ByteSize() for message in caller.got) < 4 * MIB
    shown = [slot for message in caller.got for slot, _ in message.latest]
    failed = [slot for message in caller.got for slot, _ in message.errors]
    assert (shown, failed) == ([*range(8)], [*range(10, 3010)])
