"""Time to the first token of a bare `sgl.Engine` that is given embeddings: JSON by a child process.

`python -m tests.support.benchmarks.bare_media MODEL WIDTH HEIGHT TIMES`: one request at a time,
each with the rows of an image and another hash, so that no prefix is cached, and one token.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.launch import EngineThread
from millstream_server.engines.sglang.requests.media import media_arguments
from tests.support.media.reference_media import Case, make_case
from tests.support.models.vision_models import picture

_TEXT = (
    "<|im_start|>user\nWhat?<|vision_start|><|image_pad|><|vision_end|><|im_end|>\n"
    "<|im_start|>assistant\n"
)
_PARAMS = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}


async def _times(model: Path, size: tuple[int, int], times: int) -> dict[str, Any]:
    case = make_case(model, _TEXT, [picture(*size)], n=1)
    thread = EngineThread()
    config = SglangEngineConfig(model_path=str(model), multimodal=True, max_total_tokens=16384)
    built = await thread.build(config)
    try:
        took_s = [await _once(built.engine, case, number) for number in range(times)]
    finally:
        await thread.end()
    return {"tokens": len(case.prompt.token_ids), "ttft_s": took_s}


async def _once(engine: Any, case: Case, number: int) -> float:
    digest = hashlib.sha256(str(number).encode()).digest()
    media = [replace(item, digest=digest) for item in case.prompt.media]
    began = time.monotonic()
    stream = await engine.async_generate(
        input_ids=list(case.prompt.token_ids),
        sampling_params=_PARAMS,
        stream=True,
        **media_arguments(media, Role.AGGREGATED),
    )
    first = 0.0
    async for _ in stream:
        first = first or time.monotonic() - began
    return first


def _main() -> None:
    with contextlib.closing(os.fdopen(os.dup(1), "w")) as out:
        os.dup2(2, 1)  # SGLang's processes print, too
        model, width, height, times = sys.argv[1:]
        found = asyncio.run(_times(Path(model), (int(width), int(height)), int(times)))
        json.dump(found, out)


if __name__ == "__main__":
    _main()
