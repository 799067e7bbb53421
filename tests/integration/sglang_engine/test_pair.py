"""Prefill and decode in two processes, KV cache over NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from millstream_server.engines.base import Role
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import GenerationRequest, LogprobOptions
from millstream_server.runtime.errors import (
    InvalidRequestError,
    KvTransferError,
)
from millstream_server.transfer.ticket import Ticket
from tests.support.bare_sglang import NEW_TOKENS
from tests.support.engine_process import EngineProcess
from tests.support.ports import free_port
from tests.support.sglang_requests import (
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

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="session"),
    # An engine takes 10 s to start on a quiet machine and over a minute on a busy one.
    pytest.mark.timeout(420),
]

_TRANSFER_TIMEOUT_S = 4.0


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


@pytest_asyncio.fixture(scope="class", loop_scope="session")
async def pair(
    model: Path, tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]
) -> AsyncIterator[Pair]:
    del expected
    logs = tmp_path_factory.mktemp("pair")
    port = free_port()
    prefill = await EngineProcess.launch(
        logs / "prefill",
        role=Role.PREFILL,
        bootstrap_port=port,
        model_path=str(model),
        transfer_timeout_s=_TRANSFER_TIMEOUT_S,
    )
    decode = await EngineProcess.launch(
        logs / "decode",
        role=Role.DECODE,
        model_path=str(model),
        transfer_timeout_s=_TRANSFER_TIMEOUT_S,
    )
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
        to_prefill, to_decode = pair.legs(prompt(1500, start=50 + round(delay_s * 1000)), 300)
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
        assert time.monotonic() - began < _TRANSFER_TIMEOUT_S + 2
        await released(engine)

    async def test_the_pair_still_works(self, pair: Pair, expected: list[list[int]]) -> None:
        to_prefill, to_decode = pair.legs(PROMPTS[2])
        prefill_sink = pair.prefill.submit(to_prefill)
        assert (await answer(pair.decode, to_decode)).token_ids == expected[2]
        await result(prefill_sink)
