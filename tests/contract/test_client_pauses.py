"""The client library's requests ended from outside: between two attempts, and after the answer."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_client import (
    Client,
    Options,
    RequestCancelledError,
    Retry,
    request,
    user,
)
from millstream_server.runtime.errors import OverloadedError as Overloaded
from millstream_testing.fake_processor import FakeProcessor
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.processor.scripted import Part, Scripted, broken, fail, hang, serving, text

both = pytest.mark.parametrize("kind", KINDS)
LONG_S = 9.0
"""A pause, or a wait for a connection, that a test doesn't sit out."""
SOON_S = 4.0
BUSY = fail(Overloaded("no room", retry_delay_s=LONG_S))


@pytest.fixture
def pausing(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Is set when a pause before another attempt begins."""
    begun, pause = threading.Event(), request.Request._pause

    def told(*args: Any) -> Any:
        begun.set()
        return pause(*args)

    monkeypatch.setattr(request.Request, "_pause", told)
    return begun


@contextlib.asynccontextmanager
async def _unused_address() -> AsyncIterator[str]:
    """Give an address where no server listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{unused.getsockname()[1]}"


@both
@pytest.mark.parametrize("leave", ["abort", "close", "cancel", "stream.cancel"])
async def test_a_turn_that_waits_to_be_sent_again_can_be_ended(
    kind: Kind, leave: str, pausing: threading.Event
) -> None:
    script = Scripted([BUSY], [text("B")])
    async with serving(script) as address, kind.connect(address) as client:
        conversation = client.conversation()
        stream = conversation.say("one")
        reading = asyncio.ensure_future(kind.failure(stream.answer))
        await until(pausing.is_set)
        with pytest.raises(RuntimeError, match="a turn is running"):
            await kind.run(conversation.say("two").answer)
        await kind.run(stream.cancel if "." in leave else getattr(conversation, leave))
        failed = await asyncio.wait_for(reading, SOON_S)
        assert type(failed) is RequestCancelledError
        assert (failed.code, failed.partial) == (grpc.StatusCode.CANCELLED, None)
        assert failed.message == "cancelled by the caller"
        assert (script.streams, script.open, conversation.messages) == (1, 0, ())
        assert (await kind.run(conversation.say("three").answer)).text == "B"
        assert list(script.asked[-1].start.messages) == [user("three")]
        await kind.run(conversation.close)
        await until(lambda: script.open == 0)


@both
@pytest.mark.parametrize("what", ["chat", "turn"])
async def test_a_wait_for_a_connection_can_be_ended(
    kind: Kind, what: str, pausing: threading.Event
) -> None:
    patience = Retry(first_pause_s=0.001, wait_s=LONG_S)
    options = Options(service_config={})
    async with (
        _unused_address() as address,
        kind.connect(address, retry=patience, options=options) as client,
    ):
        stream = client.chat("hi") if what == "chat" else client.conversation().say("hi")
        reading = asyncio.ensure_future(kind.failure(stream.answer))
        await until(pausing.is_set)
        done, _ = await asyncio.wait({reading}, timeout=0.1)  # past the pause of a millisecond
        assert not done
        stream.cancel()
        failed = await asyncio.wait_for(reading, SOON_S)
        assert type(failed) is RequestCancelledError
        assert (failed.code, failed.partial) == (grpc.StatusCode.CANCELLED, None)


@both
async def test_a_wait_for_a_connection_ends_at_a_server_that_knows_no_health_check(
    kind: Kind, pausing: threading.Event
) -> None:
    async with _unused_address() as address:
        pass
    server = grpc.aio.server()
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(FakeProcessor(), server)
    patience = Retry(attempts=2, first_pause_s=0.001)
    async with kind.connect(address, retry=patience, options=Options(service_config={})) as client:
        asking = asyncio.ensure_future(kind.run(client.chat("hi").answer))
        await until(pausing.is_set)
        server.add_insecure_port(address)
        await server.start()
        assert (await asking).text == "You said: hi"
    await server.stop(0)


async def test_cancelling_the_task_ends_its_pause(pausing: threading.Event) -> None:
    kind = Kind(Client)
    script = Scripted([BUSY], [text("B")])
    async with serving(script) as address, kind.connect(address) as client:
        conversation = client.conversation()
        task = asyncio.ensure_future(conversation.say("one").answer())
        await until(pausing.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await conversation.say("two").answer()).text == "B"
        assert script.streams == 2
        await conversation.close()


# ---- after the answer


class _Lingering(Scripted):
    """Answers in full, but doesn't end the stream well."""

    def __init__(self, last: Part) -> None:
        super().__init__([text("AB")])
        self._last = last

    async def Chat(
        self, request_iterator: AsyncIterator[processor_pb2.ChatRequest], context: Any
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        async for response in super().Chat(request_iterator, context):
            yield response
            if response.HasField("finished"):
                await self._last(context)


@both
@pytest.mark.parametrize(
    ("last", "timeout_s"),
    [
        pytest.param(broken(), None, id="unavailable"),
        pytest.param(fail(ZeroDivisionError()), None, id="internal"),
        pytest.param(hang, 0.5, id="deadline"),
    ],
)
async def test_a_complete_answer_is_no_failure(
    kind: Kind, last: Part, timeout_s: float | None
) -> None:
    script = _Lingering(last)
    async with serving(script) as address, kind.connect(address) as client:
        answer = await kind.run(client.chat("hi", timeout_s=timeout_s).answer)
        assert (answer.text, answer.complete, script.streams) == ("AB", True, 1)


@both
async def test_who_cancels_a_complete_answer_gets_it(kind: Kind) -> None:
    script = _Lingering(hang)
    async with serving(script) as address, kind.connect(address) as client:
        stream = client.chat("hi")
        reading = asyncio.ensure_future(kind.run(stream.answer))
        await until(lambda: stream.result.complete)
        stream.cancel()
        answer = await asyncio.wait_for(reading, SOON_S)
        assert (answer.text, answer.complete) == ("AB", True)
        await until(lambda: script.open == 0)
