"""A worker fetches a request's tensors before its engine gets it; one end whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from millstream.v1 import decode_pb2, generation_pb2
from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.generation.output import Finish, FinishReason, OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.wire import write_start
from millstream_server.generation.worker.core import GenerationWorker
from millstream_server.generation.worker.session import WorkerSession
from millstream_server.media.items import EmbeddingTicket
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    EmbeddingTransferError,
    EngineFailedError,
    InternalError,
    InvalidRequestError,
    ServingError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.worker.host import WorkerHost
from millstream_testing.in_process import hosted
from millstream_testing.waiting import until
from tests.support.media.media_requests import MODEL, WIDTH, geometry_only, item, request, tensor
from tests.support.telemetry.logged import events

ASKED = request(item("a", 2), item("b", 8))


class Fetcher:
    """Delivers what the test lets through; counts what was asked for and what was stopped."""

    tracing: Tracing | None = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.traces: set[TraceContext | None] = set()
        self.stopped: list[str] = []
        self.gate = asyncio.Event()
        self.errors: dict[str, BaseException] = {}
        self.others: dict[str, Tensor] = {}

    async def fetch(self, ticket: EmbeddingTicket, trace: TraceContext | None = None) -> Tensor:
        self.traces.add(trace)
        self.asked.append(ticket.lease)
        try:
            if ticket.lease in self.errors:
                raise self.errors[ticket.lease]
            await self.gate.wait()
        except asyncio.CancelledError:
            self.stopped.append(ticket.lease)
            raise
        return self.others.get(ticket.lease) or tensor(ticket.lease, ticket.tensor.shape)


class Engine:
    """Keeps what it gets; raises if the test says so."""

    def __init__(self) -> None:
        self.submitted: list[tuple[GenerationRequest, OutputSink]] = []
        self.aborted: list[str] = []
        self.raises: BaseException | None = None

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        if self.raises:
            raise self.raises
        self.submitted.append((request, sink))

    def abort(self, engine_id: str) -> None:
        self.aborted.append(engine_id)


class Sink:
    def __init__(self) -> None:
        self.ends: list[Finish | ServingError] = []

    def emit(self, *_: Any) -> None:
        """Take tokens."""

    def finish(self, finish: Finish) -> None:
        self.ends.append(finish)

    def fail(self, error: ServingError) -> None:
        self.ends.append(error)


class Parts:
    """A worker whose fetches and engine the test plays."""

    def __init__(self, host: WorkerHost[Any], role: Role, *, can_fetch: bool = True) -> None:
        self.host = host
        self.fetcher = Fetcher()
        self.engine = Engine()
        engine: Any = self.engine
        self.core = GenerationWorker(host, engine, None, self.fetcher if can_fetch else None)
        self.core.role = role

    @property
    def open(self) -> tuple[int, int]:
        """Open requests and their tokens."""
        return self.core.work.count, self.host.requests.tokens


async def make(role: Role = Role.AGGREGATED, **options: Any) -> Parts:
    simulated = SimulatedEngine(SimulatedConfig(media=MODEL, context_length=200))
    info = await simulated.start(lambda _: None)
    await simulated.close()
    host = hosted(simulated, Role.AGGREGATED)
    host.set_info(info)
    return Parts(host, role, **options)


async def settled(sink: Sink) -> Finish | ServingError:
    """Wait for the end; there must be one, and no other after it."""
    await until(lambda: bool(sink.ends))
    for _ in range(5):
        await asyncio.sleep(0)
    (end,) = sink.ends
    return end


async def test_the_engine_gets_the_request_with_all_tensors() -> None:
    parts, sink = await make(), Sink()
    asked = replace(ASKED, trace=TraceContext(f"00-{'1' * 32}-{'2' * 16}-01"))
    engine_id = parts.core.submit(asked, sink)
    await until(lambda: len(parts.fetcher.asked) == 2)
    assert parts.fetcher.traces == {asked.trace}
    assert parts.open == (1, 20), "it counts as open while its tensors are on the way"
    assert not parts.engine.submitted
    parts.fetcher.gate.set()
    await until(lambda: bool(parts.engine.submitted))
    ((got, to_engine),) = parts.engine.submitted
    assert got.engine_id == engine_id
    assert [one.tensor for one in got.prompt.media] == [
        tensor("a", (2, WIDTH)),
        tensor("b", (2, WIDTH)),
    ]
    assert replace(got, prompt=ASKED.prompt) == asked
    parts.core.cancel(engine_id)
    assert parts.engine.aborted == [engine_id], "from now on the engine has it"
    done = Finish(reason=FinishReason.LENGTH, prompt_tokens=20, completion_tokens=4)
    to_engine.finish(done)
    assert await settled(sink) is done
    assert parts.open == (0, 0)


async def test_one_ticket_is_fetched_once_for_all_its_items() -> None:
    parts = await make()
    parts.fetcher.gate.set()
    parts.core.submit(request(item("a", 2), item("b", 6), item("a", 10)), Sink())
    await until(lambda: bool(parts.engine.submitted))
    assert sorted(parts.fetcher.asked) == ["a", "b"]
    media = parts.engine.submitted[0][0].prompt.media
    assert media[0].tensor is media[2].tensor is not media[1].tensor


async def test_text_reaches_the_engine_at_once() -> None:
    parts = await make()
    parts.core.submit(request(), Sink())
    assert len(parts.engine.submitted) == 1
    assert not parts.fetcher.asked


async def test_a_decode_worker_fetches_nothing() -> None:
    parts = await make()
    parts.core.role = Role.DECODE
    with pytest.raises(InvalidRequestError, match="ticket"):  # the hand-off's, which isn't here
        parts.core.submit(geometry_only(ASKED), Sink())
    engine: Any = parts.engine
    assert parts.core._engine_for(geometry_only(ASKED)) is engine


async def test_a_worker_without_transfer_refuses_media() -> None:
    parts = await make(can_fetch=False)
    with pytest.raises(UnsupportedFeatureError, match=r"^media: this worker can't fetch"):
        parts.core.submit(ASKED, Sink())
    assert parts.open == (0, 0)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
async def test_a_cancel_before_the_engine_has_it_ends_it_here(turns: int) -> None:
    """At every turn of the event loop from the start of the fetch on."""
    parts, sink = await make(), Sink()
    engine_id = parts.core.submit(ASKED, sink)
    for _ in range(turns):
        await asyncio.sleep(0)
    parts.core.cancel(engine_id)
    parts.core.cancel(engine_id)
    end = await settled(sink)
    assert end == Finish(
        reason=FinishReason.CANCELLED, prompt_tokens=20, completion_tokens=0, media_tokens=4
    )
    assert sorted(parts.fetcher.stopped) == sorted(parts.fetcher.asked)
    assert parts.engine.submitted == []
    assert parts.open == (0, 0)


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancel_around_the_last_byte_is_never_lost(turns: int) -> None:
    parts, sink = await make(), Sink()
    engine_id = parts.core.submit(ASKED, sink)
    await until(lambda: len(parts.fetcher.asked) == 2)
    parts.fetcher.gate.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    parts.core.cancel(engine_id)
    for _ in range(8):
        await asyncio.sleep(0)
    if parts.engine.submitted:
        assert parts.engine.aborted == [engine_id]
        assert sink.ends == []
    else:
        (end,) = sink.ends
        assert isinstance(end, Finish)
        assert end.reason is FinishReason.CANCELLED


@pytest.mark.parametrize(
    "error",
    [
        EmbeddingTransferError("the encode worker is gone"),
        InvalidRequestError.of("ticket.signature", "does not match the suite's key"),
    ],
)
async def test_a_failed_fetch_fails_the_request_and_stops_the_others(error: ServingError) -> None:
    parts, sink = await make(), Sink()
    parts.fetcher.errors["b"] = error
    parts.core.submit(ASKED, sink)
    assert await settled(sink) is error
    assert parts.fetcher.stopped == ["a"]
    assert parts.open == (0, 0)


async def test_a_fetch_that_brings_something_else_fails_the_request() -> None:
    parts, sink = await make(), Sink()
    parts.fetcher.others["b"] = tensor("b", (1, WIDTH))
    parts.fetcher.gate.set()
    parts.core.submit(ASKED, sink)
    end = await settled(sink)
    assert isinstance(end, EmbeddingTransferError)
    assert end.message == "media[1]: [1, 8] arrived in place of [2, 8]"
    assert parts.engine.submitted == []


@pytest.mark.parametrize("where", ["fetch", "engine"])
async def test_a_bug_is_an_internal_error_with_an_id(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    parts, sink = await make(), Sink()
    bug = ZeroDivisionError("a secret")
    if where == "fetch":
        parts.fetcher.errors["a"] = bug
    else:
        parts.engine.raises = bug
    parts.fetcher.gate.set()
    with caplog.at_level(logging.ERROR):
        parts.core.submit(ASKED, sink)
        end = await settled(sink)
    assert isinstance(end, InternalError)
    assert "secret" not in end.message
    (logged,) = events(caplog, "a request with media failed")
    assert logged["error_id"] == end.error_id
    assert parts.open == (0, 0)


async def test_an_engine_that_died_meanwhile_fails_the_request() -> None:
    parts, sink = await make(), Sink()
    parts.engine.raises = EngineFailedError("it died")
    parts.fetcher.gate.set()
    parts.core.submit(ASKED, sink)
    assert isinstance(await settled(sink), EngineFailedError)


Responses = AsyncGenerator[Any, None]


@contextlib.asynccontextmanager
async def stream(parts: Parts) -> AsyncIterator[tuple[Responses, asyncio.Queue[Any]]]:
    controls: asyncio.Queue[Any] = asyncio.Queue()

    async def read() -> AsyncIterator[Any]:
        while (control := await controls.get()) is not None:
            yield control

    session = WorkerSession(parts.core, decode_pb2.DecodeResponse)
    async with contextlib.aclosing(session.responses(read())) as responses:
        yield responses, controls


def _start(asked: GenerationRequest) -> decode_pb2.DecodeRequest:
    start = generation_pb2.StartGeneration()
    write_start(start, 1, asked)
    return decode_pb2.DecodeRequest(start=start)


async def test_a_deadline_during_the_fetch() -> None:
    parts = await make()
    async with stream(parts) as (responses, controls):
        controls.put_nowait(_start(replace(ASKED, deadline_s=time.monotonic() + 0.02)))
        frame = (await asyncio.wait_for(anext(responses), 5)).frame
    (error,) = frame.errors
    assert error.slot == 1
    assert error.error.code == DeadlinePassedError.code
    assert not frame.finishes
    assert sorted(parts.fetcher.stopped) == ["a", "b"]
    assert parts.open == (0, 0)


async def test_the_end_of_the_stream_stops_the_fetch() -> None:
    parts = await make()
    async with stream(parts) as (responses, controls):
        controls.put_nowait(_start(ASKED))
        waiting = asyncio.ensure_future(anext(responses))
        await until(lambda: len(parts.fetcher.asked) == 2)
        waiting.cancel()
        await asyncio.wait({waiting})
    await until(lambda: parts.open == (0, 0))
    assert sorted(parts.fetcher.stopped) == ["a", "b"]


async def test_a_drain_waits_for_a_request_whose_tensors_are_on_the_way() -> None:
    parts = await make()
    async with stream(parts) as (responses, controls):
        controls.put_nowait(_start(ASKED))
        first = asyncio.ensure_future(anext(responses))
        await until(lambda: len(parts.fetcher.asked) == 2)
        draining = asyncio.ensure_future(parts.host.drain(0.0, 5.0))
        assert (await first).frame.draining
        await asyncio.sleep(0)
        assert not draining.done()
        parts.fetcher.gate.set()
        await until(lambda: bool(parts.engine.submitted))
        parts.engine.submitted[0][1].finish(
            Finish(reason=FinishReason.LENGTH, prompt_tokens=20, completion_tokens=4)
        )
        controls.put_nowait(None)
        assert [end.slot for end in (await anext(responses)).frame.finishes] == [1]
        assert await anext(responses, None) is None
    assert await draining
