"""What a bare `sgl.Engine` makes of inputs, and how fast: JSON by a child process.

`python -m tests.support.engines.bare_vectors MODEL`: each line of stdin is a job, answered by a
line. `{"inputs": [[5, 6]]}`: the results as SGLang gives them. `{"inputs": …, "at_once": 4,
"seconds": 2}`: so many calls with these inputs at a time; how many they were, and how long they
took. `{"inputs": …, "kind": "bert"}`: the results of transformers, of a model as `vector_models`
makes them; with `"model": "DIRECTORY"` of another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.launch import EngineThread
from millstream_server.engines.sglang.vector_model import read_model, with_ability
from tests.support.models.vector_models import by_transformers
from tests.support.processes import forked


class Bare:
    """An engine, called as its documentation says."""

    def __init__(self, engine: Any) -> None:
        self._manager = engine.tokenizer_manager
        self._request = importlib.import_module("sglang.srt.managers.io_struct").EmbeddingReqInput

    async def run(self, inputs: list[list[int]]) -> list[Any]:
        request = self._request(input_ids=[list(ids) for ids in inputs])
        results: list[Any] = []
        async for results in self._manager.generate_request(request, None):  # noqa: B007 - one
            pass
        return [result["embedding"] for result in results]

    async def rate(self, inputs: list[list[int]], at_once: int, seconds: float) -> dict[str, Any]:
        began = time.monotonic()
        calls = await self._calls(inputs, at_once, seconds)
        return {"calls": calls, "took_s": time.monotonic() - began}

    async def _calls(self, inputs: list[list[int]], at_once: int, seconds: float) -> int:
        ends, count = time.monotonic() + seconds, itertools.count()

        async def one() -> None:
            while time.monotonic() < ends:
                await self.run(inputs)
                next(count)

        await asyncio.gather(*(one() for _ in range(at_once)))
        return next(count)


async def _serve(model: Path, out: Any) -> None:
    thread = EngineThread()
    config = SglangEngineConfig(model_path=str(model), role=Role.EMBEDDING, metrics=False)
    built = await thread.build(with_ability(config, read_model(model)))
    bare = Bare(built.engine)
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            job = json.loads(line)
            answer: Any
            if "kind" in job:
                folder = Path(job.get("model", model))
                answer = by_transformers(folder, job["kind"], job["inputs"]).tolist()
            else:
                answer = await (bare.rate(**job) if "seconds" in job else bare.run(**job))
            out.write(json.dumps(answer) + "\n")
            out.flush()
    finally:
        await thread.end()


def _main() -> None:
    with contextlib.closing(os.fdopen(os.dup(1), "w")) as out:
        os.dup2(2, 1)  # SGLang's processes print, too
        asyncio.run(_serve(Path(sys.argv[1]), out))


# ---- the test's side -----------------------------------------------------------------------------


class BareProcess:
    """The test's handle of a bare engine in another process; its calls block."""

    def __init__(self, model: Path) -> None:
        stdin, to_engine = os.pipe()
        from_engine, stdout = os.pipe()
        with open(os.devnull, "wb") as nothing:  # noqa: PTH123 - as a stream
            self._process = forked.start(
                "sglang",
                "tests.support.engines.bare_vectors",
                [str(model)],
                (stdin, stdout, nothing),
                {"OMP_NUM_THREADS": "1", **os.environ},
            )
        os.close(stdin)
        os.close(stdout)
        self._jobs = os.fdopen(to_engine, "w")
        self._answers = os.fdopen(from_engine)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, **job: Any) -> Any:
        """Give it a job; return its answer."""
        self._jobs.write(json.dumps(job) + "\n")
        self._jobs.flush()
        line = self._answers.readline()
        assert line, "the bare engine's process ended"
        return json.loads(line)

    def close(self) -> None:
        self._jobs.close()
        self._process.wait(60)
        self._answers.close()


if __name__ == "__main__":
    _main()
