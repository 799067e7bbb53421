"""Prefill and decode in two processes, KV cache over NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from millstream_server.control.engine import Role
from millstream_server.control.operations import DiskWeights, MemoryTag, PauseMode
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import GenerationRequest, LogprobOptions
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import (
    AdapterNotFoundError,
    InvalidRequestError,
    KvTransferError,
    UnsupportedFeatureError,
    WorkerPausedError,
)
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    LONG,
    PROMPTS,
    aborted,
    answer,
    generation,
    prompt,
    released,
    result,
    until,
)
from tests.support.models.checkpoints import changed, make_adapter, save
from tests.support.processes.ports import free_port

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

_WAIT_S = 4.0


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
        handoff = Ticket("127.0.0.1", self._port, secrets.randbits(63))
        return (
            generation(token_ids, max_new_tokens, ticket=handoff, **options),
            generation(token_ids, max_new_tokens, ticket=handoff, **options),
        )


@contextlib.asynccontextmanager
async def _running(logs: Path, model: Path, **config: Any) -> AsyncIterator[Pair]:
    port = free_port()
    prefill = await EngineProcess.launch(
        logs / "prefill",
        role=Role.PREFILL,
        bootstrap_port=port,
        model_path=str(model),
        handoff_wait_s=_WAIT_S,
        **config,
    )
    decode = await EngineProcess.launch(
        logs / "decode",
        role=Role.DECODE,
        model_path=str(model),
        handoff_wait_s=_WAIT_S,
        **config,
    )
    await prefill.ready()
    await decode.ready()
    yield Pair(prefill, decode, port)
    await decode.close()
    await prefill.close()


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def pair(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> AsyncIterator[Pair]:
    del expected
    # The tokenizer is for grammars; most tests need none.
    async with _running(tmp_path_factory.mktemp("pair"), model, engine_tokenizer=True) as pair:
        yield pair


class TestPair:
    """Prefill and decode in two processes, KV cache over NIXL."""

    async def test_info(self, pair: Pair) -> None:
        info = await pair.prefill.ready()
        assert info.bootstrap_host == "127.0.0.1"
        assert info.bootstrap_port > 0
        assert (await pair.decode.ready()).bootstrap_port == 0

    async def test_nothing_listens_beyond_loopback(self, pair: Pair) -> None:
        engines = [psutil.Process(each.pid) for each in (pair.prefill, pair.decode)]
        processes = [each for one in engines for each in (one, *one.children(recursive=True))]
        sockets = [s for each in processes for s in each.net_connections("tcp")]
        hosts = {s.laddr.ip for s in sockets if s.status == psutil.CONN_LISTEN}
        assert hosts == {"127.0.0.1"}

    async def test_greedy_equals_the_bare_engine(
        self, pair: Pair, expected: list[list[int]]
    ) -> None:
        for ids, tokens in zip(PROMPTS, expected, strict=True):
            for _ in range(2):  # the second time from the prefix cache
                to_prefill, to_decode = pair.legs(ids)
                decode_sink = pair.decode.submit(to_decode)
                prefill_sink = pair.prefill.submit(to_prefill)
                finish = await result(decode_sink)
                assert decode_sink.token_ids == tokens
                assert finish.completion_tokens == len(tokens)
                prefilled = await result(prefill_sink)
                assert prefill_sink.token_ids == []
                assert prefilled.completion_tokens == 0
                assert prefilled.prompt_tokens == len(ids)
            assert prefilled.cached_tokens == finish.cached_tokens == len(ids) - 1
        await released(pair.prefill)
        await released(pair.decode)

    async def test_logprobs_of_the_first_token_come_too(self, pair: Pair) -> None:
        to_prefill, to_decode = pair.legs(prompt(33), logprobs=LogprobOptions(top=2))
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await result(decode_sink)
        await result(prefill_sink)
        assert [entry.token_id for entry in decode_sink.logprobs] == decode_sink.token_ids
        assert all(len(entry.top) == 2 for entry in decode_sink.logprobs)

    async def test_a_ticket_to_nowhere_is_refused(self, pair: Pair) -> None:
        fake = Ticket("2.2.2.2", 1, 5)  # SGLang's "transfer to nobody"; decode would invent
        with pytest.raises(InvalidRequestError, match="ticket"):
            await answer(pair.decode, generation(prompt(5), ticket=fake))

    # -- grammars without a next token; drawing none would end the scheduler --

    @pytest.mark.parametrize(
        ("kind", "source"),
        [(ConstraintKind.EBNF, 'root ::= root "a"'), (ConstraintKind.JSON_SCHEMA, '{"$ref": "#"}')],
    )
    async def test_a_grammar_without_a_first_token_fails_its_own_request(
        self, pair: Pair, kind: ConstraintKind, source: str
    ) -> None:
        constraint = Constraint(kind, source)
        drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "constraint": constraint}
        to_prefill, to_decode = pair.legs(prompt(40), **drawn)
        decode_sink = pair.decode.submit(to_decode)
        with pytest.raises(InvalidRequestError) as caught:
            await answer(pair.prefill, to_prefill)
        assert caught.value.violations[0].field == "sampling.constraint"
        await released(pair.prefill)
        await aborted(pair.decode, to_decode, decode_sink)

    async def test_a_grammar_that_ends_before_min_new_tokens_fails_its_own_request(
        self, pair: Pair
    ) -> None:
        constraint = Constraint(ConstraintKind.REGEX, "a")
        # Of all tokens, now equally likely, EOS alone would be accepted: it isn't among two.
        drawn: dict[str, Any] = {"temperature": 1.0, "top_k": 2, "constraint": constraint}
        to_prefill, to_decode = pair.legs(prompt(40), min_new_tokens=5, **drawn)
        prefill_sink = pair.prefill.submit(to_prefill)
        with pytest.raises(InvalidRequestError) as caught:
            await answer(pair.decode, to_decode)
        assert caught.value.violations[0].field == "sampling.constraint"
        assert "min_new_tokens" in caught.value.message
        await result(prefill_sink)
        await released(pair.decode)

    # -- abort, stage by stage --

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_abort_at_once(self, pair: Pair, half: str) -> None:
        engine: EngineProcess = getattr(pair, half)
        request, _ = pair.legs(prompt(40))
        await aborted(engine, request, engine.submit(request, abort_at_once=True))

    async def test_abort_of_a_prefill_whose_decode_never_comes(self, pair: Pair) -> None:
        request, _ = pair.legs(prompt(40))
        sink = pair.prefill.submit(request)
        await until(lambda view: view["waiting"] == 1, pair.prefill)
        await aborted(pair.prefill, request, sink)

    async def test_abort_of_a_decode_whose_prefill_never_comes(self, pair: Pair) -> None:
        _, request = pair.legs(prompt(40))
        sink = pair.decode.submit(request)
        await until(lambda view: view["used_tokens"] > 0, pair.decode)
        await aborted(pair.decode, request, sink)

    @pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04])
    async def test_abort_of_decode_during_the_transfer_frees_prefill_too(
        self, pair: Pair, delay_s: float
    ) -> None:
        to_prefill, to_decode = pair.legs(prompt(1500, start=round(delay_s * 1000)), 300)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await asyncio.sleep(delay_s)
        await aborted(pair.decode, to_decode, decode_sink)
        # Unless it was through, decode's notice ends it: nobody wants its result.
        with contextlib.suppress(KvTransferError):
            await result(prefill_sink)
        await released(pair.prefill)

    @pytest.mark.parametrize("delay_s", [0.0, 0.005, 0.01, 0.02, 0.04])
    async def test_abort_of_prefill_during_the_transfer(self, pair: Pair, delay_s: float) -> None:
        given = prompt(1500, start=50 + round(delay_s * 1000))
        to_prefill, to_decode = pair.legs(given, 500, ignore_eos=True)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await asyncio.sleep(delay_s)
        pair.prefill.abort(to_prefill.engine_id)
        await result(prefill_sink)
        await released(pair.prefill)
        # SGLang tells decode nothing: the Processor aborts that leg itself, as here.
        await aborted(pair.decode, to_decode, decode_sink)

    async def test_abort_during_decode(self, pair: Pair) -> None:
        to_prefill, to_decode = pair.legs(prompt(40), LONG, ignore_eos=True)
        decode_sink = pair.decode.submit(to_decode)
        prefill_sink = pair.prefill.submit(to_prefill)
        await decode_sink.first_token()
        await aborted(pair.decode, to_decode, decode_sink)
        assert (await result(prefill_sink)).reason is FinishReason.LENGTH

    @pytest.mark.parametrize("half", ["prefill", "decode"])
    async def test_a_peer_that_never_comes_is_a_retryable_failure(
        self, pair: Pair, half: str
    ) -> None:
        engine: EngineProcess = getattr(pair, half)
        request, _ = pair.legs(prompt(40))
        began = time.monotonic()
        with pytest.raises(KvTransferError):
            await answer(engine, request)
        assert time.monotonic() - began < _WAIT_S + 2
        await released(engine)

    async def test_prefill_tells_when_a_prompt_is_computed(self, pair: Pair) -> None:
        """By the plugin: else the first thing that SGLang says is that the transfer is over."""
        to_prefill, to_decode = pair.legs(prompt(1500, start=700))
        pair.prefill.limit_transfers(0.0)
        try:
            decode_sink = pair.decode.submit(to_decode)
            with pytest.raises(KvTransferError):
                await answer(pair.prefill, to_prefill)
        finally:
            pair.prefill.limit_transfers(30.0)
        pair.decode.abort(to_decode.engine_id)
        with contextlib.suppress(KvTransferError):
            await result(decode_sink)
        await released(pair.prefill)
        await released(pair.decode)

    async def test_the_pair_still_works(self, pair: Pair, expected: list[list[int]]) -> None:
        to_prefill, to_decode = pair.legs(PROMPTS[2])
        prefill_sink = pair.prefill.submit(to_prefill)
        assert (await answer(pair.decode, to_decode)).token_ids == expected[2]
        await result(prefill_sink)


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def operated(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    logs = tmp_path_factory.mktemp("operated")
    async with _running(logs, model, max_loras_per_batch=1) as pair:
        yield pair


class TestOperations:
    """New weights, adapters and pauses on both sides of a hand-off."""

    async def test_weights_and_adapters(self, operated: Pair, model: Path, tmp_path: Path) -> None:
        adapter, merged = make_adapter(model, tmp_path / "adapter", seed=3)
        versions = {
            "merged": save(model, tmp_path / "merged", merged),
            "A": save(model, tmp_path / "A", changed(model, 1)),
            "base": model,
        }
        seen = {}
        for version, path in versions.items():
            for engine in (operated.prefill, operated.decode):
                await engine.control("memory", "release_memory", list(MemoryTag))
                await engine.control("memory", "resume_memory", list(MemoryTag))
                await engine.control("weights", "update_weights", DiskWeights(path), version)
            seen[version] = await self._tokens(operated, version)
        assert seen["A"] != seen["base"] != seen["merged"]
        for engine in (operated.prefill, operated.decode):
            await engine.control("adapters", "load_adapter", "a", adapter)
        for _ in range(2):  # the second time from the prefix cache
            assert await self._tokens(operated, "base", adapter="a") == seen["merged"]
        assert await self._tokens(operated, "base") == seen["base"]
        # SGLang would give wrong tokens if only one side had it.
        await operated.prefill.control("adapters", "unload_adapter", "a")
        with pytest.raises(AdapterNotFoundError):
            await self._tokens(operated, "base", adapter="a")

    async def _tokens(self, operated: Pair, version: str, **changes: Any) -> list[int]:
        to_prefill, to_decode = (replace(leg, **changes) for leg in operated.legs(prompt(33)))
        decode_sink = operated.decode.submit(to_decode)
        prefill_sink = operated.prefill.submit(to_prefill)
        try:
            prefilled = await result(prefill_sink)
        except AdapterNotFoundError:
            operated.decode.abort(to_decode.engine_id)
            await result(decode_sink)
            raise
        finish = await result(decode_sink)
        assert prefilled.weight_version == finish.weight_version == version
        return decode_sink.token_ids

    async def test_pauses(self, operated: Pair) -> None:
        wanted = await self._tokens(operated, "base")
        for engine in (operated.prefill, operated.decode):
            with pytest.raises(UnsupportedFeatureError, match="IN_PLACE or ABORT"):
                await engine.control("pause", "pause", PauseMode.RETRACT)
            await engine.control("pause", "pause", PauseMode.IN_PLACE)
        going = asyncio.create_task(self._tokens(operated, "base"))
        for engine in (operated.decode, operated.prefill):
            await engine.control("pause", "go_on")
        assert await going == wanted
        to_prefill, to_decode = operated.legs(prompt(40), LONG, ignore_eos=True)
        prefill_sink, decode_sink = (
            operated.prefill.submit(to_prefill),
            operated.decode.submit(to_decode),
        )
        await decode_sink.first_token()
        await result(prefill_sink)
        await operated.decode.control("pause", "pause", PauseMode.ABORT)
        with pytest.raises(WorkerPausedError):
            await result(decode_sink)
        await operated.decode.control("pause", "go_on")
        assert await self._tokens(operated, "base") == wanted
