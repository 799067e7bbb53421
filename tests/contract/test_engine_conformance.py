"""What every engine adapter must do; one suite over all of `tests.support.engines.engines`."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from millstream_server.generation.generator import GeneratorEngine
from millstream_server.generation.output import Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import (
    GenerationRequest,
    LogprobOptions,
    Prompt,
    new_engine_id,
)
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_testing.waiting import until
from tests.support.engines.engines import ENGINES, EngineFactory

# One loop for all: an engine stays on the loop it was started on.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = (5, 6, 7, 8, 9)


@pytest.fixture(params=ENGINES)
def engine_factory(request: pytest.FixtureRequest) -> EngineFactory:
    factory: EngineFactory = request.param
    return factory


class Sink:
    """Checks the order of calls that `OutputSink` promises."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ends: list[Finish | ServingError] = []
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        assert asyncio.get_running_loop() is self.loop
        assert not self.ends, "tokens after the end"
        assert len(token_ids) > 0, "an empty delta"
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.changed.set()

    def finish(self, finish: Finish) -> None:
        self._end(finish)

    def fail(self, error: ServingError) -> None:
        self._end(error)

    def _end(self, end: Finish | ServingError) -> None:
        assert asyncio.get_running_loop() is self.loop
        self.ends.append(end)
        assert len(self.ends) == 1, "two ends"
        self.changed.set()

    async def first_token(self) -> None:
        async with asyncio.timeout(60):
            while not self.token_ids:
                assert not self.ends
                self.changed.clear()
                await self.changed.wait()

    async def finished(self) -> Finish:
        async with asyncio.timeout(60):
            while not self.ends:
                self.changed.clear()
                await self.changed.wait()
        (end,) = self.ends
        assert isinstance(end, Finish), end
        assert end.completion_tokens == len(self.token_ids)
        return end


def submit(
    engine: GeneratorEngine,
    token_ids: Sequence[int] = PROMPT,
    max_new_tokens: int = 8,
    *,
    logprobs: LogprobOptions | None = None,
    **sampling: Any,
) -> tuple[str, Sink]:
    """Start a greedy request that nothing but its length ends."""
    engine_id, sink = new_engine_id(), Sink()
    knobs = {"temperature": 0.0, "ignore_eos": True, **sampling}
    request = GenerationRequest(
        engine_id=engine_id,
        prompt=Prompt(token_ids),
        sampling=Sampling(max_new_tokens=max_new_tokens, **knobs),
        logprobs=logprobs,
    )
    engine.submit(request, sink)
    assert not sink.token_ids, "submit returns at once"
    return engine_id, sink


async def until_idle(engine: GeneratorEngine) -> None:
    async def idle() -> bool:
        load = await engine.load()
        return not (load.running_requests or load.queued_requests or load.used_blocks)

    await until(idle)


@pytest.mark.parametrize("max_new_tokens", [1, 2, 33])
async def test_a_request_ends_once_with_exact_counts(
    engine_factory: EngineFactory, max_new_tokens: int
) -> None:
    async with engine_factory() as running:
        _, sink = submit(running.engine, max_new_tokens=max_new_tokens)
        finish = await sink.finished()
        assert finish.reason is FinishReason.LENGTH
        assert finish.prompt_tokens == len(PROMPT)
        assert finish.completion_tokens == max_new_tokens
        assert 0 <= finish.cached_tokens < finish.prompt_tokens
        assert finish.matched_token_id is None
        assert all(0 <= token < running.info.vocab_size for token in sink.token_ids)
        await until_idle(running.engine)


async def test_greedy_answers_repeat(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        answers = []
        for _ in range(3):
            _, sink = submit(running.engine, max_new_tokens=16)
            await sink.finished()
            answers.append(sink.token_ids)
        assert answers[0] == answers[1] == answers[2]


async def test_a_stop_token_ends_it_and_is_the_last(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        _, whole = submit(running.engine, max_new_tokens=16)
        await whole.finished()
        stop = whole.token_ids[5]
        _, sink = submit(
            running.engine, max_new_tokens=16, ignore_eos=False, stop_token_ids=(stop,)
        )
        finish = await sink.finished()
        assert finish.reason is FinishReason.STOP
        assert finish.matched_token_id == stop == sink.token_ids[-1]
        assert sink.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


async def test_many_at_once_of_different_lengths(engine_factory: EngineFactory) -> None:
    chance = random.Random(3)
    async with engine_factory() as running:
        wanted = [
            (chance.sample(range(10, 400), chance.randint(1, 40)), chance.randint(1, 60))
            for _ in range(32)
        ]
        sinks = [submit(running.engine, prompt, length)[1] for prompt, length in wanted]
        finishes = await asyncio.gather(*(sink.finished() for sink in sinks))
        for finish, (prompt, length) in zip(finishes, wanted, strict=True):
            assert finish.reason is FinishReason.LENGTH
            assert (finish.prompt_tokens, finish.completion_tokens) == (len(prompt), length)
        await until_idle(running.engine)


@pytest.mark.parametrize("top", [0, 3])
async def test_logprobs_come_one_per_token(engine_factory: EngineFactory, top: int) -> None:
    async with engine_factory() as running:
        _, sink = submit(running.engine, max_new_tokens=12, logprobs=LogprobOptions(top=top))
        _, plain = submit(running.engine, max_new_tokens=12)
        finish = await sink.finished()
        await plain.finished()
        assert [entry.token_id for entry in sink.logprobs] == sink.token_ids
        for entry in sink.logprobs:
            assert entry.logprob <= 0
            assert len(entry.top) == top
            assert list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1])
            if top:  # greedy takes the likeliest
                assert entry.top[0][0] == entry.token_id
        assert finish.prompt_logprobs == ()
        assert plain.logprobs == []


# ---- abort


async def test_abort_at_once(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        engine_id, sink = submit(running.engine, max_new_tokens=200)
        running.engine.abort(engine_id)
        finish = await sink.finished()
        assert finish.reason is FinishReason.CANCELLED
        await until_idle(running.engine)


async def test_abort_before_the_first_token(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        engine_id, sink = submit(running.engine, list(range(10, 200)), max_new_tokens=200)

        async def accepted() -> bool:
            return (await running.engine.load()).running_requests > 0

        await until(accepted)
        running.engine.abort(engine_id)
        assert (await sink.finished()).reason is FinishReason.CANCELLED
        await until_idle(running.engine)


async def test_abort_while_decoding_and_again(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        engine_id, sink = submit(running.engine, max_new_tokens=200)
        _, other = submit(running.engine, max_new_tokens=40)
        await sink.first_token()
        running.engine.abort(engine_id)
        running.engine.abort(engine_id)
        finish = await sink.finished()
        assert finish.reason is FinishReason.CANCELLED
        assert 0 < finish.completion_tokens < 200
        assert (await other.finished()).completion_tokens == 40
        running.engine.abort(engine_id)
        await until_idle(running.engine)
        assert len(sink.ends) == 1


async def test_abort_of_an_unknown_id_or_a_prefix_does_nothing(
    engine_factory: EngineFactory,
) -> None:
    async with engine_factory() as running:
        engine_id, sink = submit(running.engine, max_new_tokens=30)
        await sink.first_token()
        for unknown in (new_engine_id(), engine_id[:8], engine_id + "0"):
            running.engine.abort(unknown)
        assert (await sink.finished()).reason is FinishReason.LENGTH


async def test_abort_of_half_of_many(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        started = [submit(running.engine, [10 + i], max_new_tokens=60) for i in range(32)]
        await started[0][1].first_token()
        for engine_id, _ in started[::2]:
            running.engine.abort(engine_id)
        finishes = [await sink.finished() for _, sink in started]
        assert all(finish.reason is FinishReason.CANCELLED for finish in finishes[::2])
        assert all(finish.reason is FinishReason.LENGTH for finish in finishes[1::2])
        assert all(finish.completion_tokens == 60 for finish in finishes[1::2])
        await until_idle(running.engine)


# ---- load and close


async def test_the_load_shows_what_runs(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        before = await running.engine.load()
        assert (before.running_requests, before.queued_requests, before.used_blocks) == (0, 0, 0)
        assert before.total_blocks == running.info.total_blocks
        engine_id, sink = submit(running.engine, max_new_tokens=200)
        await sink.first_token()
        busy = await running.engine.load()
        assert (busy.running_requests, busy.queued_requests) == (1, 0)
        running.engine.abort(engine_id)
        await sink.finished()
        await until_idle(running.engine)


async def test_close_fails_what_runs_and_may_come_twice(engine_factory: EngineFactory) -> None:
    async with engine_factory() as running:
        sinks = [submit(running.engine, max_new_tokens=200)[1] for _ in range(3)]
        await sinks[0].first_token()
        await running.engine.close()
        for sink in sinks:
            (end,) = sink.ends
            assert isinstance(end, EngineFailedError)
        await running.engine.close()
