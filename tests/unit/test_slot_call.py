"""One request at the Processor, between the worker's stream and whoever reads its entries."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.v1 import embedding_pb2
from millstream_server.control.engine import Role
from millstream_server.diffusion.request import DiffusionRequest, Kind
from millstream_server.embedding.request import RerankRequest
from millstream_server.links.entry_stream import DIFFUSION, EntryStream, SlotCall, VectorStream
from millstream_server.links.slot_stream import Connection
from millstream_server.links.unread import UnreadOutput
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError, WorkerLostError
from millstream_testing.waiting import until
from tests.support.processor.played_channel import PlayedChannel


def _stream(cancelled: list[int] | None = None) -> Any:
    """Return what a call needs of its stream; cancelled slots are added to the list."""
    cancelled = [] if cancelled is None else cancelled
    view = WorkerView("somewhere")
    return SimpleNamespace(view=view, cancel=lambda call: cancelled.append(call.slot))


def _call() -> SlotCall[str, str]:
    return SlotCall(_stream(), 0, UnreadOutput())


async def test_of_entries_that_may_be_skipped_the_last_before_another_is_kept() -> None:
    call = _call()
    for step in ("1", "2", "3"):
        call.add(step, latest=True)
    call.add("chunk", latest=False)
    call.add("4", latest=True)
    call.finish("end")
    assert [entry async for entry, _ in call.entries()] == ["3", "chunk", "4"]
    assert call.end == "end"


async def test_entries_come_before_the_failure() -> None:
    call = _call()
    call.add("chunk", latest=False)
    call.fail(WorkerLostError("gone"))
    entries = call.entries()
    assert await anext(entries) == ("chunk", False)
    with pytest.raises(WorkerLostError):
        await anext(entries)


@pytest.mark.parametrize("early", [True, False])
def test_the_end_is_told_also_if_nobody_reads(*, early: bool) -> None:
    call = _call()
    ended: list[bool] = []
    if early:
        call.when_ended(lambda: ended.append(True))
        assert not ended
    call.finish("end")
    if not early:
        call.when_ended(lambda: ended.append(True))
    assert ended == [True]


async def test_a_request_that_no_worker_takes_in_one_message_uses_no_slot() -> None:
    view = WorkerView("somewhere")
    description: Any = SimpleNamespace(role=Role.DIFFUSION)
    connection = Connection(None, description, view, lambda: None)  # type: ignore[arg-type]
    stream = EntryStream(connection, DIFFUSION[Kind.IMAGE], UnreadOutput())
    request = DiffusionRequest(kind=Kind.IMAGE, prompt="", input_image=bytes(64 << 20))
    with pytest.raises(InvalidRequestError, match="at most 67108864 go to a worker"):
        stream.start(request)
    assert (view.in_flight, view.in_use) == (0, 0)
    stream.start(replace(request, input_image=b""))
    assert view.in_flight == 1


async def test_of_too_much_unread_output_that_of_the_stalled_request_goes() -> None:
    cancelled: list[int] = []
    unread = UnreadOutput(130)
    stalled, read = (SlotCall[str, str](_stream(cancelled), slot, unread) for slot in range(2))
    entries = read.entries()
    stalled.add("1", latest=False, nbytes=60)
    for _ in range(3):
        read.add("2", latest=False, nbytes=30)
        await anext(entries)
    assert unread.used == 90
    stalled.add("3", latest=False, nbytes=50)
    assert (unread.used, cancelled) == (30, [0])
    with pytest.raises(OverloadedError, match="too much output waits"):
        await anext(stalled.entries())
    read.finish("end")
    assert [entry async for entry in entries] == []
    assert (read.end, unread.used) == ("end", 0)


async def test_what_a_cancelled_request_has_not_read_is_dropped() -> None:
    unread = UnreadOutput()
    call = SlotCall[str, str](_stream(), 0, unread)
    call.add("old", latest=True, nbytes=5)
    call.add("new", latest=True, nbytes=10)
    call.add("chunk", latest=False, nbytes=20)
    assert await anext(call.entries()) == ("new", True)
    assert unread.used == 30
    call.cancel()
    assert unread.used == 0


async def test_a_stream_that_ends_waits_for_rerank_calls_and_a_lost_one_fails_them() -> None:
    answer: asyncio.Future[embedding_pb2.RerankResponse] = asyncio.Future()
    channel, view = PlayedChannel(Rerank=answer), WorkerView("somewhere")
    described: Any = SimpleNamespace(role=Role.EMBEDDING)
    connection = Connection(channel, described, view, lambda: None)
    stream = VectorStream(connection, UnreadOutput())
    running = asyncio.ensure_future(stream.run())
    asked = asyncio.ensure_future(stream.rerank(RerankRequest(pairs=[[1]])))
    await until(lambda: view.in_flight == 1)
    stream.finish()
    for _ in range(5):
        await asyncio.sleep(0)
    embed = channel.streams["EmbeddingService/Embed"]
    assert not embed.half_closed
    answer.set_result(embedding_pb2.RerankResponse(request_id="r"))
    assert (await asked).request_id == "r"
    await until(lambda: embed.half_closed)
    embed.comes.put_nowait(None)
    await running

    stream = VectorStream(
        Connection(PlayedChannel(Rerank=asyncio.Future()), described, view, lambda: None),
        UnreadOutput(),
    )
    asked = asyncio.ensure_future(stream.rerank(RerankRequest(pairs=[[1]])))
    await until(lambda: view.in_flight == 1)
    stream.close()
    with pytest.raises(WorkerLostError):
        await asked
    assert (view.in_flight, view.in_use) == (0, 0)
