"""A `Generation` on workers that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.engines.base import (
    Finish,
    FinishReason,
    LogprobOptions,
    OutputSink,
    Sampling,
    TokenLogprob,
)
from millstream_server.processor.generation import Generation, GenerationSpec
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.processor.turn_telemetry import TurnTelemetry
from millstream_server.routing.pool import Route
from millstream_server.runtime.errors import ServingError, WorkerLostError
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker_stream.request_span import RequestSpan
from millstream_server.worker_stream.start import GenerationStart


class Played:
    """Stands where a `WorkerConnection` would; keeps what it was asked and where output goes."""

    def __init__(self) -> None:
        engine = SimpleNamespace(bootstrap_host="127.0.0.1", bootstrap_port=1)
        self.description = SimpleNamespace(engine=engine)
        self.asked: list[GenerationStart] = []
        self.sinks: list[OutputSink] = []
        self.cancels = 0

    def start(self, start: GenerationStart, sink: OutputSink) -> Callable[[], None]:
        self.asked.append(start)
        self.sinks.append(sink)
        return self._cancel

    def _cancel(self) -> None:
        self.cancels += 1


DONE = Finish(reason=FinishReason.LENGTH, prompt_tokens=2, completion_tokens=1)


def _spec(**fields: Any) -> GenerationSpec:
    return GenerationSpec(
        **{
            "request_id": "r",
            "model": "m",
            "token_ids": [1, 2],
            "sampling": Sampling(max_new_tokens=9),
            **fields,
        }
    )


async def test_prompt_logprobs_are_waited_for_even_by_a_stop(text_model: TextModel) -> None:
    prefill, decode = Played(), Played()
    closed: list[Generation] = []
    ids = text_model.encode("Hello world", add_special_tokens=False)
    spec = GenerationSpec(
        request_id="r",
        model="m",
        token_ids=[1, 2],
        sampling=Sampling(max_new_tokens=9),
        stops=("world",),
        logprobs=LogprobOptions(prompt=True),
    )
    generation = Generation(spec, text_model, Pacer(0.05), closed.append)
    route = Route(decode=cast("Any", decode), prefill=cast("Any", prefill))
    generation.start(route, TicketKey(bytes(32)))
    assert prefill.asked[0].ticket == decode.asked[0].ticket is not None
    assert prefill.asked[0].logprobs == LogprobOptions(prompt=True)
    assert decode.asked[0].logprobs == LogprobOptions()

    deltas = generation.deltas()
    first = asyncio.ensure_future(anext(deltas))
    decode.sinks[0].emit(ids)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not first.done()
    logprobs = (TokenLogprob(1, float("nan")), TokenLogprob(2, -0.5))
    prefill.sinks[0].finish(
        Finish(
            reason=FinishReason.LENGTH,
            prompt_tokens=2,
            completion_tokens=0,
            prompt_logprobs=logprobs,
        )
    )
    (delta,) = await asyncio.wait_for(first, 5)
    assert delta.matched_stop == "world"
    assert "world" not in delta.text
    assert generation.prompt_logprobs() == logprobs
    generation.close()
    generation.close()
    assert closed == [generation]
    assert generation.outcome == "STOP"


async def test_an_error_that_comes_with_the_last_stop_comes_too_late(
    text_model: TextModel,
) -> None:
    """The client has read `finished`: an error after that would be a second end."""
    worker = Played()
    ids = text_model.encode("Hello world", add_special_tokens=False)
    generation = Generation(_spec(stops=("world",)), text_model, Pacer(0.05), lambda _: None)
    generation.start(Route(decode=cast("Any", worker)), None)
    worker.sinks[0].emit(ids)
    worker.sinks[0].fail(WorkerLostError("gone"))
    given = [delta async for deltas in generation.deltas() for delta in deltas]
    assert given[-1].matched_stop == "world"
    generation.fail(WorkerLostError("later still"))
    generation.close()
    assert (generation.outcome, generation.failed_with) == ("STOP", None)


# ---- telemetry that breaks


class _BrokenSpan(RequestSpan):
    def finished(self, finish: Finish) -> None:
        raise RuntimeError

    def failed(self, error: BaseException) -> None:
        raise RuntimeError


class _BrokenTelemetry(TurnTelemetry):
    def prefill_leg(self, worker: Any) -> RequestSpan:
        return _BrokenSpan()

    decode_leg = prefill_leg

    def closed(self, *_: Any) -> None:
        raise RuntimeError


async def test_closing_frees_the_place_and_the_worker_whatever_telemetry_does(
    text_model: TextModel,
) -> None:
    worker = Played()
    closed: list[Generation] = []
    generation = Generation(
        _spec(n=2, telemetry=_BrokenTelemetry()), text_model, Pacer(0.05), closed.append
    )
    generation.start(Route(decode=cast("Any", worker)), None)
    with pytest.raises(RuntimeError):
        generation.close()
    assert closed == [generation]
    assert worker.cancels == 2


@pytest.mark.parametrize("error", [None, WorkerLostError("gone")])
async def test_a_legs_end_is_heard_whatever_telemetry_does(
    text_model: TextModel, error: ServingError | None
) -> None:
    prefill, decode = Played(), Played()
    worked: list[bool] = []
    spec = _spec(telemetry=_BrokenTelemetry(), logprobs=LogprobOptions(prompt=True))
    generation = Generation(
        spec, text_model, Pacer(0.05), lambda _: None, lambda: worked.append(True)
    )
    route = Route(decode=cast("Any", decode), prefill=cast("Any", prefill))
    generation.start(route, TicketKey(bytes(32)))
    for sink in (*decode.sinks, *prefill.sinks):
        with pytest.raises(RuntimeError):
            sink.fail(error) if error else sink.finish(DONE)
    assert worked == [True]
    deltas = generation.deltas()
    if error:
        with pytest.raises(WorkerLostError):
            await asyncio.wait_for(anext(deltas), 5)
    else:
        (delta,) = await asyncio.wait_for(anext(deltas), 5)
        assert delta.finish_reason is FinishReason.LENGTH
