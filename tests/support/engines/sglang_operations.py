"""What tests of operations on the real engine do again and again."""

from __future__ import annotations

from collections.abc import Sequence

from millstream_server.control.operations import (
    WeightSource,
)
from millstream_server.generation.output import CollectingSink, FinishReason
from tests.support.engines.engine_process import EngineProcess
from tests.support.engines.sglang_requests import (
    LONG,
    generation,
    prompt,
    released,
    result,
)

ASKED = prompt(20)


async def ask(engine: EngineProcess) -> tuple[list[int], str]:
    """Return the answer to `ASKED`, and the version of the weights that made it."""
    sink = engine.submit(generation(ASKED))
    finish = await result(sink)
    return sink.token_ids, finish.weight_version


async def replace_weights(engine: EngineProcess, source: WeightSource, version: str) -> None:
    """Check weights and put them in, as a worker does."""
    await engine.control("weights", "check_weights", source)
    await engine.control("weights", "update_weights", source, version)


async def start_running(engine: EngineProcess, count: int = 2) -> list[CollectingSink]:
    """Start requests that go on until they are aborted; return them once they generate."""
    sinks = [engine.submit(generation(prompt(40, start=n), LONG)) for n in range(count)]
    for sink in sinks:
        await sink.first_token()
    return sinks


async def end_all(engine: EngineProcess, sinks: Sequence[CollectingSink]) -> None:
    """Abort all requests, and wait until the engine has let go of them."""
    engine.abort_all()
    for sink in sinks:
        assert (await result(sink)).reason is FinishReason.CANCELLED
    await released(engine)
