"""Load a model with an `SglangEngine`, and print what it says of its progress meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
import time

from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig

_PAUSE_S = 0.005


async def _watch(model: str) -> None:
    engine = SglangEngine(SglangEngineConfig(model_path=model, max_total_tokens=512))
    said = [dataclasses.asdict(engine.load_progress())]
    spent = []
    starting = asyncio.create_task(engine.start(lambda _: None))
    try:
        while not starting.done():
            began = time.thread_time()
            now = dataclasses.asdict(engine.load_progress())
            spent.append(time.thread_time() - began)
            if now != said[-1]:
                said.append(now)
            await asyncio.wait([starting], timeout=_PAUSE_S)
        await starting
        said.append(dataclasses.asdict(engine.load_progress()))
    finally:
        await engine.close()
    spent.sort()
    print(f"median {spent[len(spent) // 2] * 1e3:.2f} ms", file=sys.stderr)  # noqa: T201
    print(f"p99 {spent[len(spent) * 99 // 100] * 1e3:.2f} ms of {len(spent)}", file=sys.stderr)  # noqa: T201
    print(json.dumps(said))  # noqa: T201


if __name__ == "__main__":
    asyncio.run(_watch(sys.argv[1]))
