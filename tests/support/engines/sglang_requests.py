"""Requests to an `EngineProcess`, and what must hold of their ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from millstream_server.generation.output import CollectingSink, Finish, FinishReason
from millstream_server.generation.request import (
    GenerationRequest,
    LogprobOptions,
    Prompt,
    new_engine_id,
)
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import (
    EngineFailedError,
)
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.engines.engine_process import EngineProcess
from tests.support.processes import forked

RELEASE_LIMIT_S = 1.0
LONG = 1500


def prompt(length: int, start: int = 0) -> list[int]:
    return [20 + (start + 7 * index) % 900 for index in range(length)]


PROMPTS = [prompt(5), prompt(20), prompt(40), prompt(60), prompt(700, start=3)]


def generation(
    token_ids: list[int],
    max_new_tokens: int = NEW_TOKENS,
    *,
    ticket: Ticket | None = None,
    logprobs: LogprobOptions | None = None,
    dp_rank: int | None = None,
    cache_salt: str = "",
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        engine_id=new_engine_id(),
        prompt=Prompt(token_ids),
        sampling=Sampling(max_new_tokens=max_new_tokens, **{"temperature": 0.0, **sampling}),
        ticket=ticket,
        logprobs=logprobs,
        dp_rank=dp_rank,
        cache_salt=cache_salt,
    )


async def answer(engine: EngineProcess, request: GenerationRequest) -> CollectingSink:
    sink = engine.submit(request)
    await result(sink)
    return sink


async def result(sink: CollectingSink) -> Finish:
    async with asyncio.timeout(60):
        return await sink.result()


async def until(condition: Callable[[dict[str, Any]], bool], engine: EngineProcess) -> None:
    """Ask SGLang until it answers what is waited for."""
    async with asyncio.timeout(30):
        while not condition(await engine.inspect()):
            await asyncio.sleep(0.005)


async def released(engine: EngineProcess) -> None:
    """Wait until nothing runs, waits or is in use, by SGLang's own account and by the adapter's."""
    async with asyncio.timeout(RELEASE_LIMIT_S):
        while True:
            view = await engine.inspect()
            load = await engine.load()
            busy = [view["running"], view["waiting"], view["used_tokens"], view["open_requests"]]
            busy += [load.running_requests, load.queued_requests, load.used_blocks]
            if not any(busy):
                return
            await asyncio.sleep(0.01)


async def aborted(engine: EngineProcess, request: GenerationRequest, sink: CollectingSink) -> None:
    """Abort; then the end must come, and everything must be released, within the limit."""
    began = time.monotonic()
    engine.abort(request.engine_id)
    finish = await result(sink)
    assert finish.reason is FinishReason.CANCELLED
    assert finish.prompt_tokens == len(request.token_ids)
    assert finish.completion_tokens == len(sink.token_ids)
    await released(engine)
    assert time.monotonic() - began < RELEASE_LIMIT_S


async def child(*arguments: str) -> Any:
    """Run a helper module that imports SGLang to its end and read its JSON."""
    done = await asyncio.to_thread(forked.run, "sglang", *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


async def dies(engine: EngineProcess, kill: Callable[[], None]) -> None:
    """Open requests must fail within a second, the worker hear of it once, its process live on."""
    sinks = [engine.submit(generation(prompt(40, start=start), LONG)) for start in range(3)]
    await sinks[0].first_token()
    kill()
    async with asyncio.timeout(RELEASE_LIMIT_S):
        for sink in sinks:
            with pytest.raises(EngineFailedError):
                await sink.result()
        await engine.engine_failed.wait()
    with pytest.raises(EngineFailedError):
        await answer(engine, generation(prompt(5)))
    assert await engine.close() == 0
    assert engine.failures == 1
