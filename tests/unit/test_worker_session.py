"""The worker's end of the stream over an engine that does exactly what the test says."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from millstream.v1 import decode_pb2, errors_pb2, generation_pb2
from millstream_server.control.engine import Role
from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.worker.session import WorkerSession
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.telemetry.logged import events

DONE = Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=1)


class Scripted:
    """Satisfies `generation.worker.session.RequestRunner`; keeps the sinks for the test."""

    role = Role.AGGREGATED

    def context_length_of(self, model: str) -> int:
        return 100

    def __init__(self) -> None:
        self.sinks: dict[str, OutputSink] = {}
        self.cancelled: list[str] = []
        self.error: Exception | None = None
        self.work = OpenWork()
        self.streams = OpenWork()

    def submit(self, request: GenerationRequest, sink: OutputSink) -> str:
        if self.error:
            raise self.error
        self.sinks[request.request_id] = sink
        return request.request_id

    def cancel(self, engine_id: str) -> None:
        self.cancelled.append(engine_id)


class Open:
    """One session with its controls and frames."""

    def __init__(self, engine: Scripted) -> None:
        self.controls: asyncio.Queue[Any] = asyncio.Queue()
        self.responses = WorkerSession(engine, decode_pb2.DecodeResponse).responses(self._read())
        self._engine = engine

    async def _read(self) -> AsyncIterator[Any]:
        while (control := await self.controls.get()) is not None:
            yield control

    def start(self, slot: int) -> None:
        start = generation_pb2.StartGeneration(slot=slot, request_id=str(slot), token_ids=[1])
        self.controls.put_nowait(decode_pb2.DecodeRequest(start=start))

    async def frame(self) -> generation_pb2.StepFrame:
        frame: generation_pb2.StepFrame = (await asyncio.wait_for(anext(self.responses), 5)).frame
        return frame

    async def sinks(self, *slots: int) -> list[OutputSink]:
        """Start slots and answer where their output goes."""
        for slot in slots:
            self.start(slot)
        waiting = asyncio.ensure_future(self.frame())
        while not all(str(slot) in self._engine.sinks for slot in slots):
            await asyncio.sleep(0)
        self.next = waiting
        return [self._engine.sinks[str(slot)] for slot in slots]


async def test_what_is_pushed_in_one_turn_of_the_loop_leaves_in_one_frame() -> None:
    stream = Open(Scripted())
    a, b = await stream.sinks(3, 9)
    a.emit((10,))
    b.emit((20,))
    a.emit((11,))
    a.finish(DONE)
    frame = await stream.next
    assert list(frame.slots) == [3, 9, 3]
    assert list(frame.token_counts) == []
    assert list(frame.token_ids) == [10, 20, 11]
    assert [finish.slot for finish in frame.finishes] == [3]
    b.emit((21,))
    second = await stream.frame()
    assert (frame.sequence, second.sequence) == (1, 2)
    assert list(second.slots) == [9]


@pytest.mark.parametrize(
    ("emits", "counts"),
    [
        ([(1, (10, 11)), (2, (20,))], [2, 1]),
        ([(1, (10,)), (2, (20, 21, 22))], [1, 3]),
        ([(1, (10, 11))], [2]),
    ],
)
async def test_counts_are_there_unless_all_are_one(
    emits: list[tuple[int, tuple[int, ...]]], counts: list[int]
) -> None:
    stream = Open(Scripted())
    a, b = await stream.sinks(1, 2)
    for slot, token_ids in emits:
        (a if slot == 1 else b).emit(token_ids)
    frame = await stream.next
    assert list(frame.slots) == [slot for slot, _ in emits]
    assert list(frame.token_counts) == counts
    assert list(frame.token_ids) == [token for _, ids in emits for token in ids]


async def test_logprobs_stand_beside_their_slots_tokens() -> None:
    stream = Open(Scripted())
    a, b = await stream.sinks(1, 2)
    a.emit((10,), [TokenLogprob(10, -0.5, ((10, -0.5),))])
    b.emit((20,))
    frame = await stream.next
    (entry,) = frame.logprobs
    assert entry.slot == 1
    assert list(entry.tokens.token_ids) == [10]
    assert list(entry.tokens.top_counts) == [1]


async def test_leaving_stops_every_open_request_once_and_no_ended_one() -> None:
    engine = Scripted()
    stream = Open(engine)
    a, _, _ = await stream.sinks(1, 2, 3)
    a.finish(DONE)
    await stream.next
    await stream.responses.aclose()
    assert sorted(engine.cancelled) == ["2", "3"]


async def test_a_start_that_breaks_is_that_slots_internal_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Scripted()
    stream = Open(engine)
    (healthy,) = await stream.sinks(1)
    engine.error = ZeroDivisionError("a secret")
    with caplog.at_level(logging.ERROR):
        stream.start(2)
        (failed,) = (await stream.next).errors
    assert failed.slot == 2
    assert failed.error.code == 13
    assert failed.error.reason == errors_pb2.ERROR_REASON_INTERNAL
    assert "secret" not in failed.error.message
    assert failed.error.error_id
    assert failed.error.error_id in failed.error.message
    (logged,) = events(caplog, "a start failed")
    assert logged["error_id"] == failed.error.error_id
    assert "ZeroDivisionError: a secret" in caplog.text, "the log says why"
    healthy.emit((5,))
    assert list((await stream.frame()).token_ids) == [5]


async def test_a_message_of_many_bad_starts_is_obeyed_as_their_errors_are_read() -> None:
    engine = Scripted()
    engine.error = InvalidRequestError.of("token_ids", "is empty")
    stream = Open(engine)
    controls = [
        generation_pb2.GenerationControl(start=generation_pb2.StartGeneration(slot=slot))
        for slot in range(5000)
    ]
    stream.controls.put_nowait(decode_pb2.DecodeRequest(controls=controls))
    stream.controls.put_nowait(None)
    failed = [
        [error.slot for error in response.frame.errors] async for response in stream.responses
    ]
    assert [slot for slots in failed for slot in slots] == [*range(5000)]
    assert max(map(len, failed)) < 1100


async def test_what_is_too_large_for_a_message_comes_in_several_in_order() -> None:
    """A frame above what the caller takes would end its stream, and every request on it."""
    stream = Open(Scripted())
    a, b = await stream.sinks(1, 2)
    alternatives = tuple((token, -1.0) for token in range(20))
    entries = [TokenLogprob(7, -0.5, alternatives)] * 40
    for step in range(500):
        a.emit([step] * 40, entries)
        b.emit((step,))
    a.finish(replace(DONE, prompt_logprobs=[TokenLogprob(1, -0.5)] * 400_000))
    b.finish(DONE)
    frames = [await stream.next]
    while not any(end.slot == 2 for end in frames[-1].finishes):
        frames.append(await stream.frame())
    tokens: dict[int, list[int]] = {1: [], 2: []}
    for frame in frames:
        at = 0
        for slot, count in zip(
            frame.slots, frame.token_counts or [1] * len(frame.slots), strict=True
        ):
            tokens[slot] += frame.token_ids[at : at + count]
            at += count
    assert tokens == {1: [step for step in range(500) for _ in range(40)], 2: list(range(500))}
    assert [len(entry.tokens.token_ids) for f in frames for entry in f.logprobs] == [40] * 500
    assert [frame.sequence for frame in frames] == list(range(1, len(frames) + 1))
    assert [end.slot for frame in frames for end in frame.finishes] == [1, 2]
    sizes = [frame.ByteSize() for frame in frames]
    assert max(sizes) < 4 << 20
    assert len(sizes) > sum(sizes) // (4 << 20), "each is nearly full"


async def test_many_failures_at_once_come_in_several_messages() -> None:
    stream = Open(Scripted())
    sinks = await stream.sinks(*range(64))
    for sink in sinks:
        sink.fail(InvalidRequestError("x" * (1 << 17)))
    frames = [await stream.next]
    while frames[-1].errors[-1].slot != 63:
        frames.append(await stream.frame())
    assert [error.slot for frame in frames for error in frame.errors] == list(range(64))
    assert max(frame.ByteSize() for frame in frames) < 4 << 20
