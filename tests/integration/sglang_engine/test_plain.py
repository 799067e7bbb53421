"""One engine that runs whole requests, as it comes."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason
from millstream_server.generation.request import LogprobOptions, new_engine_id
from millstream_server.runtime.errors import InvalidRequestError
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    LONG,
    PROMPTS,
    RELEASE_LIMIT_S,
    aborted,
    answer,
    generation,
    prompt,
    released,
    result,
    until,
)
from tests.support.models.models import CONTEXT_LENGTH, VOCAB_SIZE

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def plain(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> AsyncIterator[EngineProcess]:
    """An engine as it comes, with a small prefill chunk so that prefill can be caught at work."""
    del expected  # asked for so that the bare engine has come and gone first
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("plain") / "log",
        model_path=str(model),
        max_running_requests=4,
        extra={"chunked_prefill_size": 64},
    )
    await engine.ready()
    yield engine
    assert await engine.close() == 0


class TestPlain:
    """Aggregated, without tokenizer, not deterministic: the defaults."""

    async def test_info(self, plain: EngineProcess) -> None:
        info: GeneratorInfo = await plain.ready()
        assert info.engine == "sglang"
        assert info.vocab_size == VOCAB_SIZE
        # SGLang keeps two tokens of the model's context for itself.
        assert info.context_length == CONTEXT_LENGTH - 2
        assert info.total_blocks * info.block_size == 8192
        assert info.max_running_requests == 4
        assert info.bootstrap_host == ""

    async def test_greedy_equals_the_bare_engine(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        sinks = [await answer(plain, generation(ids)) for ids in PROMPTS]
        assert [sink.token_ids for sink in sinks] == expected

    async def test_concurrent_requests_do_not_mix(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        sinks = [plain.submit(generation(ids)) for ids in PROMPTS * 4]
        for sink in sinks:
            await result(sink)
        assert [sink.token_ids for sink in sinks] == expected * 4

    async def test_a_request_that_is_not_ours_passes_through(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        ours = generation(prompt(40), LONG, ignore_eos=True)
        sink = plain.submit(ours)
        await sink.first_token()
        assert await plain.bare(PROMPTS[1], NEW_TOKENS) == expected[1]
        # Ours had a part in each of those batches, and none of it took SGLang's way.
        assert (await plain.inspect())["tokens_through_sglang"] == 0
        assert len(sink.token_ids) >= NEW_TOKENS
        await aborted(plain, ours, sink)

    async def test_usage(self, plain: EngineProcess) -> None:
        ids = prompt(64, start=500)
        first = await result(plain.submit(generation(ids)))
        again = await result(plain.submit(generation(ids)))
        assert (first.prompt_tokens, first.completion_tokens) == (64, NEW_TOKENS)
        assert first.reason is FinishReason.LENGTH
        assert first.cached_tokens == 0
        assert again.cached_tokens == 63

    async def test_the_stop_token_is_the_last_one_emitted_and_counted(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        stop = expected[1][4]
        sink = plain.submit(generation(PROMPTS[1], stop_token_ids=(stop,)))
        finish = await result(sink)
        assert finish.reason is FinishReason.STOP
        assert finish.matched_token_id == stop
        assert sink.token_ids == expected[1][:5]
        assert finish.completion_tokens == 5

    async def test_all_of_the_promised_context_is_delivered(self, plain: EngineProcess) -> None:
        info = await plain.ready()
        room = info.context_length - 60
        sink = plain.submit(generation(prompt(60), room, ignore_eos=True))
        finish = await result(sink)
        assert finish.reason is FinishReason.LENGTH
        assert len(sink.token_ids) == room

    async def test_logprobs(self, plain: EngineProcess) -> None:
        options = LogprobOptions(top=3, prompt=True)
        ids = prompt(30, start=11)
        sink = plain.submit(generation(ids, logprobs=options))
        finish = await result(sink)
        assert [entry.token_id for entry in sink.logprobs] == sink.token_ids
        for entry in sink.logprobs:  # greedy: the chosen one is the likeliest
            likeliest, its_logprob = entry.top[0]
            assert likeliest == entry.token_id
            assert its_logprob == pytest.approx(entry.logprob, abs=1e-4)
            values = [logprob for _, logprob in entry.top]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
        assert [entry.token_id for entry in finish.prompt_logprobs] == ids
        assert math.isnan(finish.prompt_logprobs[0].logprob)
        assert all(entry.logprob < 0 for entry in finish.prompt_logprobs[1:])

    async def test_no_logprobs_unless_asked(self, plain: EngineProcess) -> None:
        sink = await answer(plain, generation(prompt(30)))
        assert sink.logprobs == []

    async def test_logit_bias(self, plain: EngineProcess) -> None:
        sink = await answer(plain, generation(prompt(30), logit_bias={7: 100.0}))
        assert set(sink.token_ids) == {7}

    async def test_a_top_k_that_would_end_the_scheduler_does_not(
        self, plain: EngineProcess
    ) -> None:
        await answer(plain, generation(prompt(5), temperature=1.0, top_k=2**70))

    async def test_a_refusal_by_sglang_is_translated(self, plain: EngineProcess) -> None:
        # Fits by the numbers, but SGLang keeps five positions more of a prompt to itself.
        ids = prompt(CONTEXT_LENGTH - 4)
        with pytest.raises(InvalidRequestError) as caught:
            await answer(plain, generation(ids, 1))
        assert caught.value.violations[0].field == "token_ids"
        await released(plain)

    async def test_sglang_leaves_our_signals_alone(self, plain: EngineProcess) -> None:
        await answer(plain, generation(prompt(5)))
        assert (await plain.inspect())["sigterm_is_ours"]

    # -- abort, stage by stage --

    async def test_abort_in_the_same_loop_iteration(self, plain: EngineProcess) -> None:
        request = generation(prompt(40), LONG)
        sink = plain.submit(request, abort_at_once=True)
        await aborted(plain, request, sink)
        assert sink.token_ids == []

    async def test_abort_while_queued(self, plain: EngineProcess) -> None:
        running = [generation(prompt(40, start=start), LONG) for start in range(4)]
        sinks = [plain.submit(request) for request in running]
        for sink in sinks:
            await sink.first_token()
        queued = generation(prompt(40, start=9), LONG)
        queued_sink = plain.submit(queued)
        await until(lambda view: view["open_requests"] == 5, plain)
        began = time.monotonic()
        plain.abort(queued.engine_id)
        finish = await result(queued_sink)
        assert time.monotonic() - began < RELEASE_LIMIT_S
        assert finish.reason is FinishReason.CANCELLED
        assert queued_sink.token_ids == []
        for request in running:
            plain.abort(request.engine_id)
        for sink in sinks:
            await result(sink)
        await released(plain)

    @pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06])
    async def test_abort_during_prefill(self, plain: EngineProcess, delay_s: float) -> None:
        start = 100 + round(delay_s * 1000)
        request = generation(prompt(1900, start=start), 50)
        sink = plain.submit(request)
        await asyncio.sleep(delay_s)
        await aborted(plain, request, sink)

    async def test_abort_during_decode(self, plain: EngineProcess) -> None:
        request = generation(prompt(40), LONG, ignore_eos=True)
        sink = plain.submit(request)
        await sink.first_token()
        await aborted(plain, request, sink)
        assert 0 < len(sink.token_ids) < LONG

    async def test_abort_after_the_end_and_of_an_unknown_id(self, plain: EngineProcess) -> None:
        request = generation(prompt(5))
        await answer(plain, request)
        plain.abort(request.engine_id)
        plain.abort(new_engine_id())
        await answer(plain, generation(prompt(5)))

    async def test_a_storm_of_aborts_at_random_moments(self, plain: EngineProcess) -> None:
        source = random.Random(7)

        async def one(start: int) -> Finish:
            await asyncio.sleep(source.random() * 2)
            request = generation(
                prompt(source.randrange(1, 900), start=start), source.randrange(1, 120)
            )
            sink = plain.submit(request)
            if start % 3:
                await asyncio.sleep(source.random() ** 3)
                plain.abort(request.engine_id)
            finish = await result(sink)
            assert finish.completion_tokens == len(sink.token_ids)
            return finish

        endings = await asyncio.gather(*(one(start) for start in range(60)))
        assert {finish.reason for finish in endings} >= {
            FinishReason.CANCELLED,
            FinishReason.LENGTH,
        }
        await released(plain)
