"""Requests on a stream to a worker that the test controls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from millstream.v1 import errors_pb2, generation_pb2
from millstream_server.generation import wire as convert
from millstream_server.generation.output import Finish, FinishReason, LogprobColumns
from millstream_server.generation.request import Prompt
from millstream_server.runtime.errors import (
    KvTransferError,
    NoWorkerError,
    ServingError,
    WorkerLostError,
)
from millstream_testing.waiting import until
from tests.support.processor.played_worker import REQUEST, Sink, finish, linked, start


def _columns(*ids: int, **more: Any) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(token_ids=ids, logprobs=[-0.5] * len(ids), **more)


def _logprobs(slot: int, top_counts: Sequence[int] = ()) -> generation_pb2.SlotLogprobs:
    tops = sum(top_counts)
    tokens = _columns(
        1, top_counts=top_counts, top_token_ids=[1] * tops, top_logprobs=[-0.5] * tops
    )
    return generation_pb2.SlotLogprobs(slot=slot, tokens=tokens)


def _finish(**more: Any) -> generation_pb2.SlotFinish:
    message = finish(0)
    message.MergeFrom(generation_pb2.SlotFinish(**more))
    return message


async def test_what_comes_for_an_abandoned_request_goes_nowhere() -> None:
    async with linked() as (worker, link):
        gone, early, other = Sink(), Sink(), Sink()
        opened = [start(link, sink) for sink in (gone, early, other)]
        worker.send(slots=[0], token_ids=[1])
        await until(lambda: bool(gone.token_ids))
        for one in opened[:2]:
            one.abandon()
        await until(lambda: len(worker.controls) == 5)
        assert {control.cancel.slot for control in worker.controls[3:]} == {0, 1}
        worker.send(slots=[0, 1, 2, 0], token_ids=[2, 3, 4, 5], finishes=[finish(0), finish(1)])
        await until(lambda: link.view.in_flight == 1)
        opened[0].abandon()  # its slot may be another's by now
        assert (gone.token_ids, early.token_ids, other.token_ids) == ([1], [], [4])
        assert (gone.ends, early.ends, link.view.pending_tokens) == ([], [], 0)


async def test_tokens_go_to_the_slot_they_are_for_in_order() -> None:
    async with linked() as (worker, link):
        a, b, c = Sink(), Sink(), Sink()
        for sink in (a, b, c):
            start(link, sink)
        assert link.view.in_flight == 3
        worker.send(slots=[2, 0], token_ids=[7, 8])
        worker.send(
            slots=[0, 1, 0], token_counts=[2, 1, 1], token_ids=[1, 2, 3, 4], finishes=[finish(0)]
        )
        await until(lambda: bool(a.ends))
        assert (a.token_ids, b.token_ids, c.token_ids) == ([8, 1, 2, 4], [3], [7])
        (end,) = a.ends
        assert end == Finish(reason=FinishReason.LENGTH, prompt_tokens=1, completion_tokens=2)
        assert link.view.in_flight == 2


@pytest.mark.parametrize("several", [False, True])
async def test_a_large_frame_is_passed_on_in_pieces(*, several: bool) -> None:
    """Others have their turns of the loop in between; ends come after all tokens."""
    async with linked() as (worker, link):
        sinks = [Sink() for _ in range(2500)]
        for sink in sinks:
            start(link, sink)
        seen = list[int]()

        def look() -> None:
            seen.append(sum(bool(sink.token_ids) for sink in sinks))
            if not sinks[0].ends:
                asyncio.get_running_loop().call_soon(look)

        counts = [2] * 2500 if several else []
        ids = list(range(2500 * (1 + several)))
        look()
        worker.send(slots=range(2500), token_counts=counts, token_ids=ids, finishes=[finish(0)])
        await until(lambda: bool(sinks[0].ends))
        assert sorted({*seen} - {0}) == [1024, 2048, 2500]
        assert [token for sink in sinks for token in sink.token_ids] == ids


async def test_logprobs_go_with_their_tokens_when_a_slot_has_several_entries() -> None:
    async with linked() as (worker, link):
        a, b = Sink(), Sink()
        for sink in (a, b):
            start(link, sink)
        worker.send(
            slots=[0, 1, 0],
            token_counts=[1, 1, 2],
            token_ids=[1, 2, 3, 4],
            logprobs=[
                generation_pb2.SlotLogprobs(slot=0, tokens=_columns(1)),
                generation_pb2.SlotLogprobs(slot=0, tokens=_columns(3, 4)),
            ],
        )
        await until(lambda: len(a.token_ids) == 3)
        assert [entry.token_id for entry in a.logprobs] == a.token_ids == [1, 3, 4]
        assert b.token_ids == [2]
        assert b.logprobs == []


async def test_a_slot_is_used_again_only_after_its_end() -> None:
    async with linked() as (worker, link):
        first, second, third = Sink(), Sink(), Sink()
        start(link, first)
        start(link, second)
        error = errors_pb2.RequestError(
            code=14, reason=errors_pb2.ERROR_REASON_KV_TRANSFER_FAILED, message="m", retryable=True
        )
        worker.send(errors=[generation_pb2.SlotError(slot=0, error=error)])
        await until(lambda: bool(first.ends))
        assert isinstance(first.ends[0], KvTransferError)
        start(link, third)
        await until(lambda: len(worker.controls) == 3)
        assert [control.start.slot for control in worker.controls] == [0, 1, 0]


async def test_an_adapter_that_a_worker_has_just_unloaded_may_be_on_another_one() -> None:
    async with linked() as (worker, link):
        sink = Sink()
        start(link, sink)
        error = errors_pb2.RequestError(
            code=5, reason=errors_pb2.ERROR_REASON_ADAPTER_NOT_FOUND, message="m"
        )
        worker.send(errors=[generation_pb2.SlotError(slot=0, error=error)])
        await until(lambda: bool(sink.ends))
        (end,) = sink.ends
        assert isinstance(end, NoWorkerError)
        assert end.retry_delay_s == 0.1


async def test_cancel_is_sent_while_the_request_is_open_and_never_for_its_successor() -> None:
    async with linked() as (worker, link):
        first, second = Sink(), Sink()
        opened = start(link, first)
        assert link.view.in_use == 1
        for _ in range(20):
            opened.cancel()
        assert (link.view.in_flight, link.view.in_use) == (1, 0)
        worker.send(finishes=[finish(0)])
        await until(lambda: bool(first.ends))
        start(link, second)
        opened.cancel()
        start(link, Sink())
        await until(lambda: len(worker.controls) == 4)
        kinds = [control.WhichOneof("control") for control in worker.controls]
        assert kinds == ["start", "cancel", "start", "start"]
        assert link.view.in_use == 2


@pytest.mark.parametrize(
    "broken",
    [
        {"finishes": [finish(5)]},
        {"slots": [5], "token_ids": [1]},
        {"slots": [0], "token_ids": [1, 2]},
        {"slots": [0], "token_ids": [1], "token_counts": [1, 1]},
        {"finishes": [generation_pb2.SlotFinish(slot=0)]},
        {"finishes": [_finish(weight_version="v" * 1025)]},
        {"finishes": [_finish(prompt_logprobs=_columns(1, 2))]},
        {"slots": [0], "token_ids": [1], "logprobs": [_logprobs(0, top_counts=[21])]},
        {"slots": [0], "token_ids": [1], "logprobs": [generation_pb2.SlotLogprobs()] * 2},
        {"slots": [0, 0], "token_ids": [1], "token_counts": [1, 0]},
        {"slots": [0] * 3, "token_ids": [1] * 3, "token_counts": [0, 3, 0]},
        {"slots": [0], "token_ids": [1] * (1 << 19 | 1), "token_counts": [1 << 19 | 1]},
        {"slots": [0, 0], "token_ids": [1] * 70_000, "token_counts": [5, 69_995]},
    ],
)
async def test_a_worker_that_breaks_the_rules_loses_its_requests_and_is_tried_again(
    broken: dict[str, Any],
) -> None:
    async with linked() as (worker, link):
        lost = Sink()
        start(link, lost)
        worker.send(**broken)
        await until(lambda: worker.connections == 2)
        (end,) = lost.ends
        assert isinstance(end, WorkerLostError)
        await until(lambda: link.view.description is not None)
        assert link.view.in_flight == 0
        again = Sink()
        start(link, again)
        worker.send(slots=[0], token_ids=[3])
        await until(lambda: again.token_ids == [3])


@pytest.mark.parametrize(
    "more",
    [
        {"slots": [0] * 3, "token_ids": [5, 6, 7]},
        {"slots": [0], "token_ids": [5, 6, 7], "token_counts": [3]},
        {
            "slots": [0],
            "token_ids": [5, 6, 7],
            "token_counts": [3],
            "logprobs": [generation_pb2.SlotLogprobs(slot=0, tokens=_columns(5, 6, 7))],
        },
    ],
    ids=["each", "together", "logprobs"],
)
async def test_a_request_that_gets_more_tokens_than_it_may_fails_alone(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with linked() as (worker, link):
        greedy, other, later = Sink(), Sink(), Sink()
        start(link, greedy)
        start(link, other)
        worker.send(slots=[0, 1], token_ids=[1, 2])
        worker.send(slots=[0], token_ids=[3])
        worker.send(**more)
        worker.send(slots=[1, 0], token_ids=[8, 9])
        await until(lambda: other.token_ids == [2, 8])
        assert [type(end) for end in greedy.ends] == [WorkerLostError]
        assert greedy.token_ids in ([1, 3], [1, 3, 5, 6])
        assert (link.view.in_flight, link.view.in_use) == (2, 1)
        await until(lambda: len(worker.controls) == 3)
        assert worker.controls[2].cancel.slot == 0
        assert caplog.text.count("a worker sent what was not asked for") == 1
        worker.send(finishes=[finish(0)])
        await until(lambda: link.view.in_flight == 1)
        start(link, later)
        worker.send(slots=[0] * 4, token_ids=[1, 2, 3, 4], finishes=[finish(0), finish(1)])
        await until(lambda: bool(later.ends) and bool(other.ends))
        assert later.token_ids == [1, 2, 3, 4]
        assert [type(sink.ends[0]) for sink in (later, other)] == [Finish, Finish]
        assert (len(greedy.ends), worker.connections) == (1, 1)


async def test_others_run_while_a_large_frame_with_logprobs_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns, seen = 0, []
    read = convert.logprobs_from_proto

    def counting(message: generation_pb2.TokenLogprobs) -> LogprobColumns:
        seen.append(turns)
        return read(message)

    monkeypatch.setattr(convert, "logprobs_from_proto", counting)
    async with linked() as (worker, link):
        sink = Sink()
        sampling = replace(REQUEST.sampling, max_new_tokens=3000)
        start(link, sink, replace(REQUEST, sampling=sampling))
        worker.send(slots=[0] * 3000, token_ids=[1] * 3000, logprobs=[_logprobs(0)] * 3000)
        while not sink.token_ids:
            turns += 1
            await asyncio.sleep(0)
        assert len(sink.logprobs) == 3000
        assert len(set(seen)) == 3


async def test_a_draining_worker_gets_no_new_requests_and_finishes_its_own() -> None:
    async with linked() as (worker, link):
        running = Sink()
        start(link, running)
        worker.send(draining=True)
        await until(lambda: link.view.description is None)
        worker.send(slots=[0], token_ids=[3], finishes=[finish(0)])
        await until(lambda: bool(running.ends))
        assert running.token_ids == [3]
        assert isinstance(running.ends[0], Finish)
        await until(worker.half_closed.is_set)


async def test_a_stream_that_ends_loses_its_requests() -> None:
    async with linked() as (worker, link):
        sinks = [Sink() for _ in range(3)]
        for sink in sinks:
            start(link, sink)
        worker.frames.put_nowait(None)
        await until(lambda: all(sink.ends for sink in sinks))
        assert link.view.description is None
        assert all(isinstance(sink.ends[0], WorkerLostError) for sink in sinks)
        await until(lambda: worker.connections == 2)
        assert [len(sink.ends) for sink in sinks] == [1, 1, 1]


async def test_a_loss_says_how_many_requests_ran_there() -> None:
    """A request's choices are one; what a dead engine ends, one by one, is one death."""
    dead = errors_pb2.RequestError(reason=errors_pb2.ERROR_REASON_ENGINE_FAILED, message="dead")
    async with linked() as (worker, link):
        sinks = [Sink() for _ in range(12)]
        for number, sink in enumerate(sinks):
            name = "one" if number < 9 else str(number)
            start(link, sink, replace(REQUEST, request_id=name))
        await until(lambda: len(worker.controls) == 12)
        worker.send(errors=[generation_pb2.SlotError(slot=0, error=dead)])
        worker.send(errors=[generation_pb2.SlotError(slot=10, error=dead)])
        await until(lambda: bool(sinks[10].ends))
        worker.frames.put_nowait(None)
        await until(lambda: all(sink.ends for sink in sinks))
        assert [getattr(sink.ends[0], "open_requests", 0) for sink in sinks] == [4] * 12


async def test_slots_are_counted_afresh_after_a_loss() -> None:
    async with linked() as (worker, link):
        for _ in range(3):
            start(link, Sink())
        worker.send(finishes=[finish(1)])
        await until(lambda: link.view.in_flight == 2)
        worker.frames.put_nowait(None)
        await until(lambda: worker.connections == 2 and link.view.description is not None)
        sent = len(worker.controls)
        for _ in range(3):
            start(link, Sink())
        await until(lambda: len(worker.controls) == sent + 3)
        assert [control.start.slot for control in worker.controls[sent:]] == [0, 1, 2]


# ---- accidents


class Clumsy(Sink):
    """Fails to take its end."""

    def finish(self, finish: Finish) -> None:
        super().finish(finish)
        raise RuntimeError

    def fail(self, error: ServingError) -> None:
        super().fail(error)
        raise RuntimeError


async def test_a_sink_that_breaks_costs_the_others_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked() as (worker, link):
        ended, lost, other = Clumsy(), Clumsy(), Sink()
        for sink in (ended, lost, other):
            start(link, sink)
        worker.send(slots=[2], token_ids=[7], finishes=[finish(0)])
        await until(lambda: bool(ended.ends))
        assert link.view.description is not None
        worker.frames.put_nowait(None)
        await until(lambda: bool(other.ends))
        assert isinstance(lost.ends[0], WorkerLostError)
        assert isinstance(other.ends[0], WorkerLostError)
        assert caplog.text.count("a request's end failed") == 2


async def test_a_request_that_cannot_be_written_takes_no_slot() -> None:
    async with linked() as (worker, link):
        with pytest.raises(TypeError):
            start(link, Sink(), replace(REQUEST, prompt=Prompt(cast("Any", ["x"]))))
        assert (link.view.in_flight, link.view.in_use) == (0, 0)
        sink = Sink()
        start(link, sink)
        await until(lambda: bool(worker.controls))
        assert [control.start.slot for control in worker.controls] == [0]
        worker.frames.put_nowait(None)
        await until(lambda: bool(sink.ends))
