"""One SGLang engine in a process of its own, scraped while it works; prints what was seen as JSON.

`python -m tests.support.engines.scraped_engine MODEL_FOLDER`
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.generation.output import CollectingSink
from millstream_server.generation.request import GenerationRequest, Prompt, new_engine_id
from millstream_server.generation.sampling import Sampling
from millstream_server.runtime.telemetry.metrics_endpoint import MetricsEndpoint
from millstream_server.worker.engine_metrics import EngineMetrics
from tests.support.processes import preloads
from tests.support.telemetry.scraping import OPENMETRICS, Scrape, scrape

REQUESTS, PROMPT, NEW, LONG = 3, 30, 60, 1900
_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_LIMIT_S = 60


def submit(engine: GeneratorEngine, new_tokens: int) -> tuple[str, CollectingSink]:
    """Start a request with a prompt of `PROMPT` tokens."""
    sink = CollectingSink()
    request = GenerationRequest(
        engine_id=new_engine_id(),
        prompt=Prompt(range(20, 20 + PROMPT)),
        sampling=Sampling(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True),
    )
    engine.submit(request, sink)
    return request.engine_id, sink


async def until_running(port: int, count: int) -> Scrape:
    """Scrape until SGLang itself says that so many requests run."""
    async with asyncio.timeout(_LIMIT_S):
        while True:
            answer = await scrape(port)
            if answer.value("sglang:num_running_reqs") == count:
                return answer
            await asyncio.sleep(0.05)


async def observe(engine: GeneratorEngine, port: int) -> dict[str, Any]:
    """Answer some requests one by one, then scrape during a long one and after it."""
    for _ in range(REQUESTS):
        await submit(engine, NEW)[1].result()
    after = await scrape(port)
    long, sink = submit(engine, LONG)
    await sink.first_token()
    busy = await until_running(port, 1)
    engine.abort(long)
    await sink.result()
    idle = await until_running(port, 0)
    as_openmetrics = await scrape(port, OPENMETRICS)
    scrapes = {"after": after, "busy": busy, "idle": idle, "openmetrics": as_openmetrics}
    return {
        "scrapes": {name: [s.content_type, s.text] for name, s in scrapes.items()},
        "directory": os.environ[_VARIABLE],
        "pid": os.getpid(),
    }


async def run(model: str) -> dict[str, Any]:
    """Serve, observe, close."""
    engine = SglangEngine(SglangEngineConfig(model_path=model, served_model_name="tiny"))
    metrics = EngineMetrics(engine, Role.AGGREGATED, "tiny")
    endpoint = MetricsEndpoint("127.0.0.1:0", "test", [metrics])
    try:
        info = await engine.start(lambda _: None)
        await engine.warm_up()
        metrics.ready(info)
        seen = await observe(engine, endpoint.port)
        seen["total_blocks"] = info.total_blocks
        seen["block_size"] = info.block_size
    finally:
        await engine.close()
        await endpoint.close()
    return seen


if __name__ == "__main__":
    if _VARIABLE in os.environ:  # this is an interpreter of its own; SGLang's processes needn't be
        preloads.fork_engine_processes(preloads.SGLANG)
    out = os.fdopen(os.dup(1), "w")  # what SGLang prints goes to stderr
    os.dup2(2, 1)
    seen = asyncio.run(run(sys.argv[1]))
    seen["directory_left"] = Path(seen["directory"]).exists()
    seen["variable_left"] = os.environ.get(_VARIABLE, "")
    json.dump(seen, out)
    out.close()
