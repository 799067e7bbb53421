"""The SGLang adapter against real engines on the CPU.

Every engine runs in a process of its own (`support.engine_process`), so nothing of SGLang is
imported here. Class-scoped fixtures keep at most two engines alive at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.engines.base import (
    CollectingSink,
    Constraint,
    ConstraintKind,
    EngineInfo,
    Finish,
    FinishReason,
    GenerationRequest,
    KvHandoff,
    LogprobOptions,
    Role,
    Sampling,
    new_engine_id,
)
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
    UnsupportedFeatureError,
)
from tests.support.bare_sglang import NEW_TOKENS
from tests.support.engine_process import EngineProcess
from tests.support.models import CONTEXT_LENGTH, VOCAB_SIZE, make_random_model

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

_RELEASE_LIMIT_S = 1.0
_TRANSFER_TIMEOUT_S = 4.0
_LONG = 1500


# ---- helpers ------------------------------------------------------------------------------------


def _prompt(length: int, start: int = 0) -> list[int]:
    return [20 + (start + 7 * index) % 900 for index in range(length)]


_PROMPTS = [_prompt(5), _prompt(20), _prompt(40), _prompt(60), _prompt(700, start=3)]


def _request(
    token_ids: list[int],
    max_new_tokens: int = NEW_TOKENS,
    *,
    handoff: KvHandoff | None = None,
    logprobs: LogprobOptions | None = None,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        engine_id=new_engine_id(),
        token_ids=token_ids,
        sampling=Sampling(max_new_tokens=max_new_tokens, **{"temperature": 0.0, **sampling}),
        handoff=handoff,
        logprobs=logprobs,
    )


async def _answer(engine: EngineProcess, request: GenerationRequest) -> CollectingSink:
    sink = engine.submit(request)
    await _result(sink)
    return sink


async def _result(sink: CollectingSink) -> Finish:
    async with asyncio.timeout(60):
        return await sink.result()


async def _until(condition: Callable[[dict[str, Any]], bool], engine: EngineProcess) -> None:
    async with asyncio.timeout(30):
        while not condition(await engine.inspect()):
            await asyncio.sleep(0.005)


async def _released(engine: EngineProcess) -> None:
    """Wait until nothing runs, waits or is in use, by SGLang's own account and by the adapter's."""
    async with asyncio.timeout(_RELEASE_LIMIT_S):
        while True:
            view = await engine.inspect()
            load = await engine.load()
            busy = [view["running"], view["waiting"], view["used_tokens"], view["open_requests"]]
            busy += [load.running_requests, load.queued_requests, load.used_blocks]
            if not any(busy):
                return
            await asyncio.sleep(0.01)


async def _aborted(engine: EngineProcess, request: GenerationRequest, sink: CollectingSink) -> None:
    """Abort; then the end must come, and everything must be released, within the limit."""
    began = time.monotonic()
    engine.abort(request.engine_id)
    finish = await _result(sink)
    assert finish.reason is FinishReason.CANCELLED
    assert finish.prompt_tokens == len(request.token_ids)
    assert finish.completion_tokens == len(sink.token_ids)
    await _released(engine)
    assert time.monotonic() - began < _RELEASE_LIMIT_S


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _child(*arguments: str) -> Any:
    """Run a helper module to its end and read its JSON."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *arguments, stdout=subprocess.PIPE, limit=2**24
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return json.loads(out)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def expected(model: Path) -> list[list[int]]:
    """What a bare `sgl.Engine` answers to `_PROMPTS`."""
    answers: list[list[int]] = await _child(
        "tests.support.bare_sglang", "generate", str(model), json.dumps(_PROMPTS)
    )
    return answers


# ---- one engine for whole requests --------------------------------------------------------------


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
        info: EngineInfo = await plain.ready()
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
        sinks = [await _answer(plain, _request(ids)) for ids in _PROMPTS]
        assert [sink.token_ids for sink in sinks] == expected

    async def test_concurrent_requests_do_not_mix(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        sinks = [plain.submit(_request(ids)) for ids in _PROMPTS * 4]
        for sink in sinks:
            await _result(sink)
        assert [sink.token_ids for sink in sinks] == expected * 4

    async def test_usage(self, plain: EngineProcess) -> None:
        ids = _prompt(64, start=500)
        first = await _result(plain.submit(_request(ids)))
        again = await _result(plain.submit(_request(ids)))
        assert (first.prompt_tokens, first.completion_tokens) == (64, NEW_TOKENS)
        assert first.reason is FinishReason.LENGTH
        assert first.cached_tokens == 0
        assert again.cached_tokens == 63

    async def test_the_stop_token_is_the_last_one_emitted_and_counted(
        self, plain: EngineProcess, expected: list[list[int]]
    ) -> None:
        stop = expected[1][4]
        sink = plain.submit(_request(_PROMPTS[1], stop_token_ids=(stop,)))
        finish = await _result(sink)
        assert finish.reason is FinishReason.STOP
        assert finish.matched_token_id == stop
        assert sink.token_ids == expected[1][:5]
        assert finish.completion_tokens == 5

    async def test_all_of_the_promised_context_is_delivered(self, plain: EngineProcess) -> None:
        info = await plain.ready()
        room = info.context_length - 60
        sink = plain.submit(_request(_prompt(60), room, ignore_eos=True))
        finish = await _result(sink)
        assert finish.reason is FinishReason.LENGTH
        assert len(sink.token_ids) == room

    async def test_logprobs(self, plain: EngineProcess) -> None:
        options = LogprobOptions(top=3, prompt=True)
        ids = _prompt(30, start=11)
        sink = plain.submit(_request(ids, logprobs=options))
        finish = await _result(sink)
        assert [entry.token_id for entry in sink.logprobs] == sink.token_ids
        for entry in sink.logprobs:  # greedy: the chosen one is the likeliest
            assert entry.top[0] == (entry.token_id, pytest.approx(entry.logprob, abs=1e-4))
            values = [logprob for _, logprob in entry.top]
            assert values == sorted(values, reverse=True)
            assert len(values) == 3
        assert [entry.token_id for entry in finish.prompt_logprobs] == ids
        assert finish.prompt_logprobs[0].logprob != finish.prompt_logprobs[0].logprob  # NaN
        assert all(entry.logprob < 0 for entry in finish.prompt_logprobs[1:])

    async def test_no_logprobs_unless_asked(self, plain: EngineProcess) -> None:
        sink = await _answer(plain, _request(_prompt(30)))
        assert sink.logprobs == []

    async def test_logit_bias(self, plain: EngineProcess) -> None:
        sink = await _answer(plain, _request(_prompt(30), logit_bias={7: 100.0}))
        assert set(sink.token_ids) == {7}

    @pytest.mark.parametrize("bad", [VOCAB_SIZE, -1, 2**40])
    async def test_a_token_outside_the_vocabulary_never_reaches_sglang(
        self, plain: EngineProcess, bad: int
    ) -> None:
        with pytest.raises(InvalidRequestError) as caught:
            await _answer(plain, _request([1, 2, bad]))
        assert caught.value.violations[0].field == "token_ids[2]"
        await _answer(plain, _request(_prompt(5)))

    async def test_a_top_k_that_would_end_the_scheduler_does_not(
        self, plain: EngineProcess
    ) -> None:
        await _answer(plain, _request(_prompt(5), temperature=1.0, top_k=2**70))

    async def test_a_missing_ability_is_refused(self, plain: EngineProcess) -> None:
        with pytest.raises(UnsupportedFeatureError, match="deterministic"):
            await _answer(plain, _request(_prompt(5), seed=1))

    async def test_a_refusal_by_sglang_is_translated(self, plain: EngineProcess) -> None:
        # Fits by the numbers, but SGLang keeps five positions more of a prompt to itself.
        ids = _prompt(CONTEXT_LENGTH - 4)
        with pytest.raises(InvalidRequestError) as caught:
            await _answer(plain, _request(ids, 1))
        assert caught.value.violations[0].field == "token_ids"
        await _released(plain)

    async def test_sglang_leaves_our_signals_alone(self, plain: EngineProcess) -> None:
        await _answer(plain, _request(_prompt(5)))
        assert (await plain.inspect())["sigterm_is_ours"]

    # -- abort, stage by stage --

    async def test_abort_in_the_same_loop_iteration(self, plain: EngineProcess) -> None:
        request = _request(_prompt(40), _LONG)
        sink = plain.submit(request, abort_at_once=True)
        await _aborted(plain, request, sink)
        assert sink.token_ids == []

    async def test_abort_while_queued(self, plain: EngineProcess) -> None:
        running = [_request(_prompt(40, start=start), _LONG) for start in range(4)]
        sinks = [plain.submit(request) for request in running]
        for sink in sinks:
            await sink.first_token()
        queued = _request(_prompt(40, start=9), _LONG)
        queued_sink = plain.submit(queued)
        await _until(lambda view: view["open_requests"] == 5, plain)
        began = time.monotonic()
        plain.abort(queued.engine_id)
        finish = await _result(queued_sink)
        assert time.monotonic() - began < _RELEASE_LIMIT_S
        assert finish.reason is FinishReason.CANCELLED
        assert queued_sink.token_ids == []
        for request in running:
            plain.abort(request.engine_id)
        for sink in sinks:
            await _result(sink)
        await _released(plain)

    @pytest.mark.parametrize("delay_s", [0.0, 0.01, 0.03, 0.06])
    async def test_abort_during_prefill(self, plain: EngineProcess, delay_s: float) -> None:
        start = 100 + round(delay_s * 1000)
        request = _request(_prompt(1900, start=start), 50)
        sink = plain.submit(request)
        await asyncio.sleep(delay_s)
        await _aborted(plain, request, sink)

    async def test_abort_during_decode(self, plain: EngineProcess) -> None:
        request = _request(_prompt(40), _LONG, ignore_eos=True)
        sink = plain.submit(request)
        await sink.first_token()
        await _aborted(plain, request, sink)
        assert 0 < len(sink.token_ids) < _LONG

    async def test_abort_after_the_end_and_of_a_stranger(self, plain: EngineProcess) -> None:
        request = _request(_prompt(5))
        await _answer(plain, request)
        plain.abort(request.engine_id)
        plain.abort(new_engine_id())
        await _answer(plain, _request(_prompt(5)))

    async def test_a_storm_of_aborts_at_random_moments(self, plain: EngineProcess) -> None:
        source = random.Random(7)

        async def one(start: int) -> Finish:
            await asyncio.sleep(source.random() * 2)
            request = _request(
                _prompt(source.randrange(1, 900), start=start), source.randrange(1, 120)
            )
            sink = plain.submit(request)
            if start % 3:
                await asyncio.sleep(source.random() ** 3)
                plain.abort(request.engine_id)
            finish = await _result(sink)
            assert finish.completion_tokens == len(sink.token_ids)
            return finish

        endings = await asyncio.gather(*(one(start) for start in range(60)))
        assert {finish.reason for finish in endings} >= {
            FinishReason.CANCELLED,
            FinishReason.LENGTH,
        }
        await _released(plain)


# ---- what settings turn on ----------------------------------------------------------------------


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def able(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineProcess]:
    """An engine with every ability."""
    engine = await EngineProcess.launch(
        tmp_path_factory.mktemp("able") / "log",
        model_path=str(model),
        deterministic=True,
        engine_tokenizer=True,
    )
    await engine.ready()
    yield engine
    await engine.close()


class TestAble:
    """Aggregated, deterministic, with a tokenizer."""

    async def test_a_seed_repeats_and_matters(self, able: EngineProcess) -> None:
        async def draw(seed: int) -> list[int]:
            request = _request(_prompt(20), temperature=1.0, seed=seed)
            return (await _answer(able, request)).token_ids

        assert await draw(1) == await draw(1) != await draw(2)

    async def test_min_new_tokens_holds_stop_tokens_back(self, able: EngineProcess) -> None:
        free = (await _answer(able, _request(_prompt(20)))).token_ids
        stop = free[2]
        request = _request(_prompt(20), stop_token_ids=(stop,), min_new_tokens=6)
        assert stop not in (await _answer(able, request)).token_ids[:6]

    @pytest.mark.parametrize(
        ("kind", "source", "answers"),
        [
            (ConstraintKind.EBNF, 'root ::= "yes" | "no"', {"yes", "no"}),
            (ConstraintKind.REGEX, "a{3}b", {"aaab"}),
            (ConstraintKind.JSON_SCHEMA, '{"enum": [1, 2]}', {"1", "2"}),
        ],
    )
    async def test_constraints(
        self,
        able: EngineProcess,
        model: Path,
        kind: ConstraintKind,
        source: str,
        answers: set[str],
    ) -> None:
        from tokenizers import Tokenizer  # noqa: PLC0415 - only here

        request = _request(_prompt(20), 20, constraint=Constraint(kind, source))
        sink = able.submit(request)
        assert (await _result(sink)).reason is FinishReason.STOP
        text = Tokenizer.from_file(str(model / "tokenizer.json")).decode(sink.token_ids)
        assert text.strip() in answers

    @pytest.mark.parametrize(
        ("kind", "source"),
        [
            (ConstraintKind.EBNF, "root := "),
            (ConstraintKind.REGEX, "[0-9"),
            (ConstraintKind.JSON_SCHEMA, "{not json"),
        ],
    )
    async def test_a_bad_grammar_fails_its_own_request_without_a_token(
        self, able: EngineProcess, kind: ConstraintKind, source: str
    ) -> None:
        sink = able.submit(_request(_prompt(20), constraint=Constraint(kind, source)))
        with pytest.raises(InvalidRequestError) as caught:
            await _result(sink)
        assert caught.value.violations[0].field == "sampling.constraint"
        assert sink.token_ids == []
        await _released(able)

    async def test_abort_while_a_grammar_is_compiled(self, able: EngineProcess) -> None:
        grammar = Constraint(ConstraintKind.REGEX, "([0-9]{3,9}[a-z]{2,8}){90}")
        request = _request(_prompt(20), 400, constraint=grammar)
        sink = able.submit(request)
        await asyncio.sleep(0.005)
        await _aborted(able, request, sink)
        assert sink.token_ids == []

    async def test_the_detokenizers_death_is_noticed(self, able: EngineProcess) -> None:
        # The last test of its class: the engine does not come back.
        _scheduler, detokenizer = (await able.inspect())["pids"]
        await _dies(able, lambda: os.kill(detokenizer, signal.SIGKILL))


# ---- prefill and decode -------------------------------------------------------------------------


class Pair:
    """A prefill and a decode engine, and requests that meet."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess, port: int) -> None:
        self.prefill = prefill
        self.decode = decode
        self._port = port

    def legs(
        self, token_ids: list[int], max_new_tokens: int = NEW_TOKENS, **options: Any
    ) -> tuple[GenerationRequest, GenerationRequest]:
        """Make the two requests of one hand-off."""
        handoff = KvHandoff("127.0.0.1", self._port, secrets.randbits(63))
        return (
            _request(token_ids, max_new_tokens, handoff=handoff, **options),
            _request(token_ids, max_new_tokens, handoff=handoff, **options),
        )


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def pair(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> AsyncIterator[Pair]:
    del expected
    logs = tmp_path_factory.mktemp("pair")
    port = _free_port()
    shared = {"model_path": str(model), "transfer_timeout_s": _TRANSFER_TIMEOUT_S}
    prefill = await EngineProcess.launch(
        logs / "prefill", role=Role.PREFILL, bootstrap_port=port, **shared
    )
    decode = await EngineProcess.launch(logs / "decode", role=Role.DECODE, **shared)
    await prefill.ready()
    await decode.ready()
    yield Pair(prefill, decode, port)
    await decode.close()
    await prefill.close()


class TestPair:
    """Prefill and decode in two processes, KV cache over NIXL."""

    async def test_info(self, pair: Pair) -> None:
        info = await pair.prefill.ready()
        assert info.bootstrap_host == "127.0.0.1"
        assert info.bootstrap_port > 0
        assert (await pair.decode.ready()).bootstrap_port == 0

    async def test_greedy_equals_the_bare_engine(
        self, pair: Pair, expected: list[list[int]]
    ) -> None:
        for ids, answer in zip(_PROMPTS, expected, strict=True):
            for _ in range(2):  # the second time from the prefix cache
                to_prefill, to_decode = pair.legs(ids)
                decode_sink = pair.decode.submit(to_decode)
                prefill_sink = pair.prefill.submit(to_prefill)
                finish = await _result(decode_sink)
                assert decode_sink.token_ids == answer
                assert finish.completion_tokens == len(answer)
                prefilled = await _result(prefill_sink)
                assert prefill_sink.token_ids == []
                assert prefilled.completion_tokens == 0
                assert prefilled.prompt_tokens == len(ids)
            assert prefilled.cached_tokens == finish.cached_tokens == len(ids) - 1
        await _released(pair.prefill)
        await _released(pair.decode)

    async def test_logprobs_of_the_first_token_come_too(self, pair: Pair) -> None:
        to_prefill, to_decode = pair.legs(_prompt(33), logprobs=LogprobOptions(top=2))
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await _result(decode_sink)
        await _result(prefill_sink)
        assert [entry.token_id for entry in decode_sink.logprobs] == decode_sink.token_ids
        assert all(len(entry.top) == 2 for entry in decode_sink.logprobs)

    async def test_a_ticket_to_nowhere_is_refused(self, pair: Pair) -> None:
        fake = KvHandoff("2.2.2.2", 1, 5)  # SGLang's "transfer to nobody"; decode would invent
        with pytest.raises(InvalidRequestError, match="ticket"):
            await _answer(pair.decode, _request(_prompt(5), handoff=fake))

    # -- abort, stage by stage --

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_abort_at_once(self, pair: Pair, half: str) -> None:
        engine: EngineProcess = getattr(pair, half)
        request, _ = pair.legs(_prompt(40))
        await _aborted(engine, request, engine.submit(request, abort_at_once=True))

    async def test_abort_of_a_prefill_whose_decode_never_comes(self, pair: Pair) -> None:
        request, _ = pair.legs(_prompt(40))
        sink = pair.prefill.submit(request)
        await _until(lambda view: view["waiting"] == 1, pair.prefill)
        await _aborted(pair.prefill, request, sink)

    async def test_abort_of_a_decode_whose_prefill_never_comes(self, pair: Pair) -> None:
        _, request = pair.legs(_prompt(40))
        sink = pair.decode.submit(request)
        await _until(lambda view: view["used_tokens"] > 0, pair.decode)
        await _aborted(pair.decode, request, sink)

    @pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04])
    async def test_abort_of_decode_during_the_transfer_frees_prefill_too(
        self, pair: Pair, delay_s: float
    ) -> None:
        to_prefill, to_decode = pair.legs(_prompt(1500, start=round(delay_s * 1000)), 300)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await asyncio.sleep(delay_s)
        await _aborted(pair.decode, to_decode, decode_sink)
        try:
            await _result(prefill_sink)
        except KvTransferError:
            pass  # unless it was through, decode's notice ends it: nobody wants its result
        await _released(pair.prefill)

    @pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04])
    async def test_abort_of_prefill_during_the_transfer(self, pair: Pair, delay_s: float) -> None:
        to_prefill, to_decode = pair.legs(_prompt(1500, start=50 + round(delay_s * 1000)), 300)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await asyncio.sleep(delay_s)
        pair.prefill.abort(to_prefill.engine_id)
        await _result(prefill_sink)
        await _released(pair.prefill)
        # SGLang tells decode nothing: the Processor aborts that leg itself, as here.
        await _aborted(pair.decode, to_decode, decode_sink)

    async def test_abort_during_decode(self, pair: Pair) -> None:
        to_prefill, to_decode = pair.legs(_prompt(40), _LONG, ignore_eos=True)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await decode_sink.first_token()
        await _aborted(pair.decode, to_decode, decode_sink)
        assert (await _result(prefill_sink)).reason is FinishReason.LENGTH

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_a_peer_that_never_comes_is_a_retryable_failure(
        self, pair: Pair, half: str
    ) -> None:
        engine: EngineProcess = getattr(pair, half)
        request, _ = pair.legs(_prompt(40))
        began = time.monotonic()
        with pytest.raises(KvTransferError):
            await _answer(engine, request)
        assert time.monotonic() - began < _TRANSFER_TIMEOUT_S + 2
        await _released(engine)

    async def test_the_pair_still_works(self, pair: Pair, expected: list[list[int]]) -> None:
        to_prefill, to_decode = pair.legs(_PROMPTS[2])
        prefill_sink = pair.prefill.submit(to_prefill)
        assert (await _answer(pair.decode, to_decode)).token_ids == expected[2]
        await _result(prefill_sink)


# ---- death --------------------------------------------------------------------------------------


async def _dies(engine: EngineProcess, kill: Callable[[], None]) -> None:
    """Open requests must fail within a second, the worker hear of it once, its process live on."""
    sinks = [engine.submit(_request(_prompt(40, start=start), _LONG)) for start in range(3)]
    await sinks[0].first_token()
    kill()
    async with asyncio.timeout(_RELEASE_LIMIT_S):
        for sink in sinks:
            with pytest.raises(EngineFailedError):
                await sink.result()
        await engine.engine_failed.wait()
    with pytest.raises(EngineFailedError):
        await _answer(engine, _request(_prompt(5)))
    assert await engine.close() == 0
    assert engine.failures == 1


@pytest.mark.parametrize("way", ["killed", "reports an exception"])
async def test_the_schedulers_death_is_noticed(model: Path, tmp_path: Path, way: str) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", model_path=str(model))
    await engine.ready()
    scheduler, _detokenizer = (await engine.inspect())["pids"]

    def kill() -> None:
        if way == "killed":
            os.kill(scheduler, signal.SIGKILL)
        else:  # what a scheduler sends its parent when it hits an exception
            os.kill(engine.pid, signal.SIGQUIT)

    await _dies(engine, kill)
    assert not _alive(scheduler)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_an_engine_that_cannot_start_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", model_path=str(tmp_path / "no-model"))
    with pytest.raises(EngineFailedError) as caught:
        await engine.ready()
    assert str(tmp_path) not in caught.value.message
    assert await engine.close() == 0


async def test_an_unknown_engine_argument_is_named(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(
        tmp_path / "log", model_path=str(model), extra={"no_such_argument": 1}
    )
    with pytest.raises(EngineFailedError, match="no_such_argument"):
        await engine.ready()
    await engine.close()


async def test_closing_while_it_starts(model: Path, tmp_path: Path) -> None:
    engine = await EngineProcess.launch(tmp_path / "log", close_after_s=2.0, model_path=str(model))
    with pytest.raises(EngineFailedError):
        await engine.ready()
    assert await engine.close() == 0


# ---- the vendor and the stand-in ----------------------------------------------------------------


async def test_the_names_we_use_are_there() -> None:
    """Fails first, and by name, when SGLang moves on."""
    names = await _child("tests.support.bare_sglang", "names")
    assert names["version"] == "0.5.23"
    assert set(names["async_generate"]) >= {
        "input_ids", "sampling_params", "rid", "stream", "return_logprob", "top_logprobs_num",
        "logprob_start_len", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "routed_dp_rank", "disagg_prefill_dp_rank", "external_trace_header",
    }  # fmt: skip
    assert set(names["server_args"]) >= {
        "model_path", "device", "dtype", "log_level", "host", "skip_tokenizer_init",
        "incremental_streaming_output", "enable_deterministic_inference", "max_total_tokens",
        "max_running_requests", "context_length", "disaggregation_mode", "sleep_on_idle",
        "disaggregation_transfer_backend", "disaggregation_bootstrap_port", "page_size",
        "disaggregation_decode_retraction_backup", "attention_backend", "sampling_backend",
        "disable_cuda_graph", "dp_size", "weight_version",
    }  # fmt: skip
    assert set(names["sampling"]) >= {
        "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
        "presence_penalty", "repetition_penalty", "ignore_eos", "min_new_tokens",
        "stop_token_ids", "sampling_seed", "logit_bias", "json_schema", "regex", "ebnf",
    }  # fmt: skip
    assert len(names["engine_attributes"]) == 4
    assert {"shutdown", "get_all_child_pids", "async_generate"} <= set(names["engine_methods"])
    assert {"configure_logger", "kill_process_tree"} <= set(names["engine_module"])
    assert {"handle_loop", "abort_request", "get_loads"} <= set(names["manager_methods"])
    assert "dispatched" in names["request_state"]
    assert "if self.event_loop is not None:\n            return" in names["handle_loop_guard"]
    assert set(names["load"]) >= {
        "num_running_reqs", "num_waiting_reqs", "num_used_tokens", "max_running_requests",
        "disaggregation", "queues",
    }  # fmt: skip
    assert "prefill_inflight_queue_reqs" in names["load_disaggregation"]
    assert "grammar" in names["load_queues"]
    assert names["fake_host"] == "2.2.2.2"
    assert set(names["environment"]) >= {
        "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT",
        "SGLANG_DISAGGREGATION_WAITING_TIMEOUT",
    }


def _python(program: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if "SGLANG" not in key}
    return subprocess.run(  # noqa: S603 - our own program
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def test_importing_the_adapter_changes_nothing() -> None:
    program = """
import os, sys
before = dict(os.environ), list(sys.path), list(sys.meta_path)
import millstream_server.engines.sglang_cpu as stand_in
import millstream_server.engines.sglang_engine
assert (dict(os.environ), list(sys.path), list(sys.meta_path)) == before
assert not stand_in.is_active()
assert not {"sglang", "torch", "triton", "sgl_kernel"} & set(sys.modules)
for name in ("sgl_kernel", "triton", "millstream_sglang_cpu_plugin"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(name)
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_the_stand_in_refuses_a_machine_with_a_gpu() -> None:
    program = """
import pathlib, sys
from millstream_server.engines import sglang_cpu
sglang_cpu._GPU_DEVICES = (pathlib.Path("/dev/null"),)
try:
    sglang_cpu.activate()
except RuntimeError as error:
    assert "GPU" in str(error)
    assert not sglang_cpu.is_active()
else:
    raise AssertionError
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_is_missing_fails_loudly() -> None:
    program = """
from millstream_server.engines import sglang_cpu
sglang_cpu.activate()
import triton, triton.language as tl, sgl_kernel
@triton.jit
def kernel(x: tl.constexpr): pass
for launch in (lambda: kernel[(1,)](1), lambda: sgl_kernel.awq_dequantize()):
    try:
        launch()
    except NotImplementedError:
        continue
    raise AssertionError
"""
    done = _python(program)
    assert done.returncode == 0, done.stderr


def test_a_patch_that_no_longer_fits_ends_the_process() -> None:
    program = """
from millstream_server.engines import sglang_cpu
sglang_cpu.activate()
import sglang.srt.batch_invariant_ops as changed
del changed.enable_batch_invariant_mode
try:
    sglang_cpu.patch_sglang()
except RuntimeError as error:
    assert "enable_batch_invariant_mode" in str(error)
else:
    raise AssertionError
from sglang.srt.plugins import load_plugins  # what SGLang's own processes call
load_plugins()
"""
    done = _python(program)
    assert done.returncode == 1
    assert "cannot be applied" in done.stderr
