"""A `Generation` on workers that the test plays itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

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
from millstream_server.routing.pool import Route
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker_stream.start import GenerationStart


class Played:
    """Stands where a `WorkerConnection` would; keeps what it was asked and where output goes."""

    def __init__(self) -> None:
        engine = SimpleNamespace(bootstrap_host="127.0.0.1", bootstrap_port=1)
        self.description = SimpleNamespace(engine=engine)
        self.asked: list[GenerationStart] = []
        self.sinks: list[OutputSink] = []

    def start(self, start: GenerationStart, sink: OutputSink) -> Callable[[], None]:
        self.asked.append(start)
        self.sinks.append(sink)
        return lambda: None


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
