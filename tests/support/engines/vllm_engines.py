"""Real vLLM engines in the test's own process, and requests to them.

Unlike SGLang, vLLM keeps its state in objects, so prefill and decode engines of a test share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, Finish
from millstream_server.generation.request import GenerationRequest, Prompt, new_engine_id
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import EngineData, Ticket, TicketKey
from millstream_server.runtime.errors import ServingError
from tests.support.processes.ports import free_port

KEY = TicketKey(bytes(32))
NEW_TOKENS = 12
LONG = 900
PROMPTS = [
    [(11 * n + 7 * i) % 900 + 50 for i in range(length)]
    for n, length in enumerate([1, 2, 7, 15, 31, 32, 33, 40, 50, 63, 64, 65, 80, 96, 97, 100])
] + [[200 + n] * 37 for n in range(4)]


@dataclass
class Started:
    """A started and warm engine."""

    engine: VllmEngine
    info: GeneratorInfo
    failures: list[ServingError]

    def submit(self, request: GenerationRequest) -> CollectingSink:
        sink = CollectingSink()
        self.engine.submit(request, sink)
        return sink

    async def answer(self, request: GenerationRequest) -> CollectingSink:
        sink = self.submit(request)
        await result(sink)
        return sink

    async def abort(self, request: GenerationRequest, sink: CollectingSink) -> Finish:
        self.engine.abort(request.engine_id)
        return await result(sink)


@contextlib.asynccontextmanager
async def started(model: Path, **config: Any) -> AsyncIterator[Started]:
    failures: list[ServingError] = []
    engine = VllmEngine(VllmEngineConfig(model_path=str(model), **config))
    try:
        info = await engine.start(failures.append)
        await engine.warm_up()
        yield Started(engine, info, failures)
    finally:
        await engine.close()


class Pair:
    """A prefill and a decode engine, and requests that meet."""

    def __init__(self, prefill: Started, decode: Started) -> None:
        self.prefill = prefill
        self.decode = decode

    def ticket(self) -> Ticket:
        """Mint one as the Processor does before prefill starts."""
        transfer = self.prefill.info.kv_transfer
        assert transfer is not None
        data = None if transfer.prefill_first else EngineData(transfer.kind, transfer.data)
        return KEY.mint(self.prefill.info.bootstrap_host, 0, None, data)

    async def hand_off(
        self,
        request: GenerationRequest,
        *,
        decode_first: bool = False,
        apart_s: float = 0.0,
        at_decode: Prompt | None = None,
    ) -> tuple[list[int], Finish, Finish]:
        """Run both legs in the order of the engines; return decode's tokens and both ends.

        ``at_decode`` is the prompt as decode gets it, if it isn't the same.
        """
        legs = [replace(request, engine_id=new_engine_id(), ticket=self.ticket()) for _ in "pd"]
        legs[1] = replace(legs[1], ticket=legs[0].ticket, prompt=at_decode or request.prompt)
        assert self.prefill.info.kv_transfer is not None
        if self.prefill.info.kv_transfer.prefill_first:
            first = await result(self.prefill.submit(legs[0]))
            assert legs[1].ticket is not None
            assert first.engine_data is not None
            legs[1] = replace(legs[1], ticket=KEY.renew(legs[1].ticket, first.engine_data))
            sink = self.decode.submit(legs[1])
            return sink.token_ids, first, await result(sink)
        if decode_first:
            sink = self.decode.submit(legs[1])
            await asyncio.sleep(apart_s)
            before = self.prefill.submit(legs[0])
        else:
            before = self.prefill.submit(legs[0])
            await asyncio.sleep(apart_s)
            sink = self.decode.submit(legs[1])
        return sink.token_ids, await result(before), await result(sink)


@contextlib.asynccontextmanager
async def started_pair(model: Path, **config: Any) -> AsyncIterator[Pair]:
    """Start a prefill and a decode engine with the same settings."""
    async with (
        started(model, role=Role.PREFILL, bootstrap_port=free_port(), **config) as prefill,
        started(model, role=Role.DECODE, **config) as decode,
    ):
        yield Pair(prefill, decode)


def generation(
    token_ids: Sequence[int], max_new_tokens: int = NEW_TOKENS, **options: Any
) -> GenerationRequest:
    """Make a greedy request."""
    fields = {"adapter", "cache_salt", "logprobs", "priority", "ticket", "dp_rank", "engine_id"}
    others = {name: options.pop(name) for name in fields & options.keys()}
    media = options.pop("media", ())
    knobs = {"temperature": 0.0, **options}
    return GenerationRequest(
        prompt=Prompt(tuple(token_ids), media),
        sampling=Sampling(max_new_tokens=max_new_tokens, **knobs),
        **others,
    )


async def result(sink: CollectingSink, limit_s: float = 60.0) -> Finish:
    async with asyncio.timeout(limit_s):
        return await sink.result()


async def reference(model: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """What transformers answers, greedily, up to an EOS."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.support.engines.reference_llama"),
        *(str(count), json.dumps(prompts), str(model)),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await child.communicate()
    assert child.returncode == 0
    (answers,) = json.loads(output)
    return answers  # type: ignore[no-any-return]
