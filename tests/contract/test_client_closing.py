"""Closing clients: running, pausing, waiting and later calls fail with a clear error."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from millstream.v1 import processor_pb2_grpc
from millstream_client import (
    Client,
    DeadlineExceededError,
    Options,
    RequestCancelledError,
    Retry,
    SyncClient,
    system,
)
from millstream_client.request import Attempts
from millstream_server.runtime.errors import OverloadedError as Overloaded
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.processor.scripted import Scripted, fail, hang, serving, text
from tests.support.wire.transports import new_server

both = pytest.mark.parametrize("kind", KINDS)
LONG_S = 9.0
"""A pause, or a wait for a connection, that a test doesn't sit out."""
SOON_S = 3.0
BUSY = fail(Overloaded("no room", retry_delay_s=LONG_S))
PATIENT = Retry(first_pause_s=0.001, wait_s=LONG_S)
AT_ONCE = Options(service_config={})
"""Without gRPC's own retries, an attempt fails in milliseconds where no server listens."""

CALLS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "chat": lambda client: client.chat("hi").answer,
    "turn": lambda client: client.conversation().say("hi").answer,
    "models": lambda client: client.models,
    "complete": lambda client: client.complete("hi").answer,
    "tokenize": lambda client: functools.partial(client.tokenize, "hi"),
    "detokenize": lambda client: functools.partial(client.detokenize, [1]),
    "health": lambda client: client.health,
}
every_call = pytest.mark.parametrize("what", CALLS)
retried = pytest.mark.parametrize("what", ["chat", "turn", "models"])


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Fail when a thread does, were it gRPC's, and were it after the test."""
    before = set(threading.enumerate())
    failed: list[Any] = []
    threading.excepthook, hook = failed.append, threading.excepthook
    try:
        yield
        for thread in set(threading.enumerate()) - before:
            if "(_run)" in thread.name:  # gRPC's for threads; others outlast a test
                thread.join(SOON_S)
    finally:
        threading.excepthook = hook
    assert failed == []


@pytest.fixture
def reached(monkeypatch: pytest.MonkeyPatch) -> dict[str, threading.Semaphore]:
    """Is released when a pause before another attempt begins, and when a wait for a connection."""
    marks = {}
    for name in ("pause_s", "wait_s"):
        mark, real = threading.Semaphore(0), getattr(Attempts, name)
        marks[name] = mark

        def told(*args: Any, mark: Any = mark, real: Any = real) -> Any:
            mark.release()
            return real(*args)

        monkeypatch.setattr(Attempts, name, told)
    return marks


async def _passed(mark: threading.Semaphore) -> None:
    await until(lambda: mark.acquire(blocking=False))


def _is_told(failed: Any) -> None:
    assert type(failed) is RequestCancelledError
    assert (failed.code, failed.message) == (grpc.StatusCode.CANCELLED, "the client was closed")
    assert (failed.retryable, failed.partial) == (False, None)


class _Hanging(Scripted, health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # it has no types
    """Answers nobody."""

    async def Complete(self, request: Any, context: Any) -> Any:
        await self._hang()
        yield

    async def ListModels(self, request: Any, context: Any) -> Any:
        await self._hang()

    async def Tokenize(self, request: Any, context: Any) -> Any:
        await self._hang()

    async def Detokenize(self, request: Any, context: Any) -> Any:
        await self._hang()

    async def Render(self, request: Any, context: Any) -> Any:
        await self._hang()

    async def Parse(self, requests: Any, context: Any) -> Any:
        await self._hang()
        yield

    async def Check(self, request: Any, context: Any) -> Any:
        await self._hang()

    async def _hang(self) -> None:
        self.open += 1
        try:
            await hang(None)
        finally:
            self.open -= 1


@contextlib.asynccontextmanager
async def _hanging() -> AsyncIterator[tuple[str, _Hanging]]:
    script = _Hanging([hang])
    server = new_server()
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(script, server)
    health_pb2_grpc.add_HealthServicer_to_server(script, server)
    port = server.bind("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", script
    finally:
        await server.stop(0)


@contextlib.contextmanager
def _unused_address() -> Iterator[str]:
    """Give an address where no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@contextlib.asynccontextmanager
async def _mute() -> AsyncIterator[tuple[str, list[Any]]]:
    """Give an address that takes connections but never speaks, and those it took."""
    taken: list[Any] = []
    server = await asyncio.start_server(lambda _, writer: taken.append(writer), "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", taken
    finally:
        for writer in taken:
            writer.close()
        server.close()
        await server.wait_closed()


# ---- what was begun


@both
@every_call
async def test_closing_ends_what_runs(kind: Kind, what: str) -> None:
    async with _hanging() as (address, script), kind.connect(address) as client:
        calling = asyncio.ensure_future(kind.failure(CALLS[what](client)))
        await until(lambda: script.open == 1)
        await kind.run(client.close)
        _is_told(await asyncio.wait_for(calling, SOON_S))
        await until(lambda: script.open == 0)


@both
@every_call
async def test_closing_ends_what_is_still_connecting(kind: Kind, what: str) -> None:
    async with _mute() as (address, taken), kind.connect(address) as client:
        calling = asyncio.ensure_future(kind.failure(CALLS[what](client)))
        await until(lambda: len(taken) == 1)
        await kind.run(client.close)
        _is_told(await asyncio.wait_for(calling, SOON_S))


@both
@retried
async def test_closing_ends_a_pause(
    kind: Kind, what: str, reached: dict[str, threading.Semaphore]
) -> None:
    script = Scripted([BUSY])
    async with serving(script) as address, kind.connect(address) as client:
        calling = asyncio.ensure_future(kind.failure(CALLS[what](client)))
        await _passed(reached["pause_s"])
        await kind.run(client.close)
        _is_told(await asyncio.wait_for(calling, SOON_S))
        assert len(script.asked_at_s) == 1


@both
@retried
@pytest.mark.parametrize("callers", [1, 3])
async def test_closing_ends_waits_for_a_connection(
    kind: Kind, what: str, callers: int, reached: dict[str, threading.Semaphore]
) -> None:
    with _unused_address() as address:
        async with kind.connect(address, retry=PATIENT, options=AT_ONCE) as client:
            calling = []
            for _ in range(callers):
                calling.append(asyncio.ensure_future(kind.failure(CALLS[what](client))))
                await _passed(reached["wait_s"])
            await kind.run(client.close)
            for failed in await asyncio.wait_for(asyncio.gather(*calling), SOON_S):
                _is_told(failed)


@pytest.mark.parametrize("what", ["models", "tokenize", "detokenize", "health"])
async def test_a_group_of_tasks_hears_that_the_client_was_closed(what: str) -> None:
    """A bare CancelledError is a task's that was cancelled: the group would end well."""

    async def share(client: Client) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(CALLS[what](client)())
            await until(lambda: script.open == 1)
            await client.close()

    async with _hanging() as (address, script), Client(address) as client:
        with pytest.raises(ExceptionGroup) as caught:
            await share(client)
        (failed,) = caught.value.exceptions
        _is_told(failed)


@both
async def test_closing_hands_over_what_came_of_an_answer(kind: Kind) -> None:
    script = Scripted([text("AB"), hang])
    async with serving(script) as address, kind.connect(address) as client:
        stream = client.chat("hi", request_id="mine")
        assert (await kind.next(stream)).text == "AB"
        await kind.run(client.close)
        failed = await kind.failure(stream.answer)
        assert type(failed) is RequestCancelledError
        assert (failed.message, failed.request_id) == ("the client was closed", "mine")
        assert failed.partial is stream.result
        assert failed.partial.text == "AB"
        await until(lambda: script.open == 0)


async def test_closing_ends_a_cancel_that_is_not_sent_yet() -> None:
    """The turn hears how it ended; who cancels it wasn't cancelled."""
    async with _mute() as (address, taken), Client(address) as client:
        conversation = client.conversation()
        calling = asyncio.ensure_future(Kind(Client).failure(conversation.say("hi").answer))
        await until(lambda: len(taken) == 1)
        cancelling = asyncio.ensure_future(conversation.cancel())
        await asyncio.sleep(0)  # it writes
        await client.close()
        await asyncio.wait_for(cancelling, SOON_S)
        _is_told(await asyncio.wait_for(calling, SOON_S))


@both
@pytest.mark.parametrize("by", ["timeout_s", "stream.cancel", "abort", "close"])
async def test_a_turn_that_is_still_connecting_can_be_ended(kind: Kind, by: str) -> None:
    async with _mute() as (address, taken), kind.connect(address) as client:
        conversation = client.conversation()
        stream = conversation.say("hi", timeout_s=0.1 if by == "timeout_s" else None)
        calling = asyncio.ensure_future(kind.failure(stream.answer))
        await until(lambda: len(taken) == 1)
        if by != "timeout_s":
            await kind.run(stream.cancel if "." in by else getattr(conversation, by))
        failed = await asyncio.wait_for(calling, SOON_S)
        ended_by = DeadlineExceededError if by == "timeout_s" else RequestCancelledError
        assert (type(failed), failed.partial) == (ended_by, None)


@both
async def test_a_client_keeps_nothing_of_requests_that_are_over(kind: Kind) -> None:
    script = Scripted([text("A")], [fail(ZeroDivisionError())], [text("A"), hang], [])
    async with serving(script) as address, kind.connect(address) as client:
        await kind.run(client.chat("hi").answer)
        await kind.failure(client.chat("hi").answer)
        stream = client.chat("hi")
        await kind.next(stream)
        assert len(kind.running(client)) == 1
        del stream
        await until(lambda: script.open == 0)
        await kind.run(client.models)
        assert not kind.running(client)


# ---- what comes later


@both
@every_call
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
async def test_a_closed_client_begins_nothing(kind: Kind, what: str, *, used: bool) -> None:
    script = Scripted()
    async with serving(script) as address, kind.connect(address) as client:
        early = CALLS[what](client)
        if used:
            assert len((await kind.run(client.tokenize, "hi")).token_ids) == 2
        await kind.run(client.close)
        for call in (early, CALLS[what](client)):
            _is_told(await asyncio.wait_for(kind.failure(call), SOON_S))
        assert script.streams == 0


@both
async def test_a_conversation_goes_no_further_than_its_client(kind: Kind) -> None:
    script = Scripted([text("A")])
    async with serving(script) as address, kind.connect(address) as client:
        conversation = client.conversation([system("S")])
        await kind.run(conversation.say("one").answer)
        await kind.run(client.close)
        _is_told(await kind.failure(conversation.say("two").answer))
        assert len(conversation.messages) == 3
        for leave in (conversation.cancel, conversation.abort, conversation.close):
            await kind.run(leave)
        await until(lambda: script.open == 0)
        assert script.streams == 1


@both
@pytest.mark.parametrize("used", [True, False], ids=["used", "unused"])
async def test_a_closed_client_gives_no_channel(kind: Kind, *, used: bool) -> None:
    """Stubs made on a closed channel of grpcio 1.85 end the process."""
    client = kind.make("127.0.0.1:1")
    if used:
        assert isinstance(client.channel, grpc.aio.Channel | grpc.Channel)
    await kind.run(client.close)
    for name in ("channel", "stub"):
        with pytest.raises(RequestCancelledError, match="the client was closed"):
            getattr(client, name)
    await kind.run(client.close)  # again: it does nothing


@every_call
async def test_a_client_may_be_closed_just_as_a_call_begins(what: str) -> None:
    """After the look whether it is open: what gRPC raises then isn't for the caller."""
    client = SyncClient("127.0.0.1:1")
    connection = client._inner.connection

    def metadata() -> Any:
        client.close()  # in the background thread, where it mustn't wait for itself
        return ()

    connection.metadata = metadata  # type: ignore[method-assign]
    with pytest.raises(RequestCancelledError) as caught:
        CALLS[what](client)()
    _is_told(caught.value)
    client.close()
