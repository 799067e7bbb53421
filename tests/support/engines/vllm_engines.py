"""Real vLLM engines in the test's own process, and requests to them.

Unlike SGLang, vLLM keeps its state in objects, so prefill and decode engines of a test share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.engine import VllmEngine
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, Finish
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.errors import ServingError

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


def generation(
    token_ids: Sequence[int], max_new_tokens: int = NEW_TOKENS, **options: Any
) -> GenerationRequest:
    """Make a greedy request."""
    fields = {"adapter", "cache_salt", "logprobs", "priority", "ticket", "dp_rank", "deadline_s"}
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
