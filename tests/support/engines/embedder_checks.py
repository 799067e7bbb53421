"""What every embedder must do, as functions that raise.

A process runs one SGLang engine at most, so a job checks one embedder and prints the result of
every check as JSON: `python -m tests.support.engines.embedder_checks MODEL KIND`.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from millstream_server.control.engine import Role
from millstream_server.embedding.embedder import Embedder, EmbedderInfo
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.embedder import SglangEmbedder
from millstream_server.engines.simulated.vectors import (
    SimulatedEmbedder,
    SimulatedEmbedderConfig,
    logit,
    vector,
)
from millstream_server.engines.transformers.embedder import TransformersEmbedder
from millstream_server.engines.transformers.vector_model import VectorModelConfig
from millstream_server.engines.vllm.config import VllmEngineConfig
from millstream_server.engines.vllm.embedder import VllmEmbedder
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    ServingError,
)
from millstream_testing.waiting import until
from tests.support.models.vector_models import (
    DIMENSIONS,
    LONGEST,
    VOCAB_SIZE,
    WIDTH,
    Kind,
    by_transformers,
    is_ranker,
)

SIMULATED = ("simulated", "simulated_ranker")
SGLANG: tuple[Kind, ...] = (
    *("qwen3", "bert", "xlmr"),
    *("xlmr_ranker", "bert_ranker", "qwen3_answers"),
)
TRANSFORMERS: tuple[Kind, ...] = ("bert_mean", "bert_segments", "qwen3_head", "qwen3_logit")
VLLM: tuple[Kind, ...] = ("qwen3", "bert", "xlmr", "xlmr_ranker", "bert_ranker")
PADDING = 3
TOLERANCE = 1e-4
INPUTS = [[5, 6, 7, 8], [9, 10, 11], [4], list(range(20, 120)), [3, 4, 5], [8, 7, 6, 5]]
"""One has a token that XLM-RoBERTa takes for padding; two differ by their order only."""
_SIMULATED = SimulatedEmbedderConfig(
    width=WIDTH, vocab_size=VOCAB_SIZE, max_running_requests=64, token_s=0.00002
)


_POOL = {"qwen3": 300}
"""A KV cache that is smaller than the model's context."""


@dataclass
class Started:
    """An embedder that has started and is warm."""

    embedder: Embedder
    info: EmbedderInfo
    kind: str
    model: Path
    failures: list[ServingError] = field(default_factory=list)

    @property
    def inputs(self) -> list[list[int]]:
        """`INPUTS`, without what the engine refuses by name."""
        padding = isinstance(self.embedder, VllmEmbedder) and self.kind.startswith("xlmr")
        return [ids for ids in INPUTS if not (padding and PADDING in ids)]

    async def run(self, inputs: Sequence[Sequence[int]]) -> np.ndarray:
        return await (self.embedder.rank if self.info.ranks else self.embedder.embed)(inputs)

    def truth(self, inputs: Sequence[Sequence[int]]) -> np.ndarray:
        """Return what the simulated rule, or transformers, says of the same inputs."""
        if self.kind not in SIMULATED:
            unit = self.info.normalizes
            return by_transformers(self.model, cast("Kind", self.kind), inputs, unit=unit)
        if self.info.ranks:
            return np.array([logit(ids) for ids in inputs], np.float32)
        return np.array([vector(ids, WIDTH) for ids in inputs], np.float32)

    def equal(self, made: np.ndarray, inputs: Sequence[Sequence[int]]) -> None:
        truth = self.truth(inputs)
        assert made.dtype == np.float32
        np.testing.assert_allclose(made, truth, atol=TOLERANCE, rtol=1e-5)
        if self.info.embeds:
            lengths = np.linalg.norm(made, axis=1) * np.linalg.norm(truth, axis=1)
            assert ((made * truth).sum(axis=1) / lengths).min() > 0.9999

    def die(self) -> None:
        """End the engine as a crash does."""
        if isinstance(self.embedder, SimulatedEmbedder):
            self.embedder.die()
        elif isinstance(self.embedder, SglangEmbedder):
            built, _ = self.embedder._lifetime.ready()
            scheduler, *_ = built.engine.get_all_child_pids()
            os.kill(scheduler, signal.SIGKILL)
        elif isinstance(self.embedder, VllmEmbedder):
            core, *_ = self.embedder._lifetime.ready()[0].pids()
            os.kill(core, signal.SIGKILL)


async def info(started: Started) -> None:
    found = started.info
    ranks = is_ranker(started.kind)
    assert (found.embeds, found.ranks) == (not ranks, ranks)
    assert (found.width, found.vocab_size) == (0 if ranks else WIDTH, VOCAB_SIZE)
    if started.kind == "qwen3":
        assert found.dimensions == DIMENSIONS
    if isinstance(started.embedder, SglangEmbedder):
        by_pool = _POOL.get(started.kind, 1 << 20) - 7
        assert found.max_input_tokens == min(LONGEST[cast("Kind", started.kind)], by_pool)
    assert found.max_batch_tokens >= found.max_input_tokens
    assert found.max_running_requests == 64


async def results(started: Started) -> None:
    """Right, in order, and the same for an input alone."""
    together = await started.run(started.inputs)
    assert together.shape == (
        (len(started.inputs),) if started.info.ranks else (len(started.inputs), WIDTH)
    )
    started.equal(together, started.inputs)
    for ids, row in zip(started.inputs, together, strict=True):
        np.testing.assert_allclose((await started.run([ids]))[0], row, atol=TOLERANCE, rtol=1e-5)
    # No input's result is another's.
    assert len(np.unique(together.round(4), axis=0)) == len(started.inputs)


async def overlapping(started: Started) -> None:
    made = await asyncio.gather(*(started.run([ids, ids[:1]]) for ids in started.inputs))
    for ids, rows in zip(started.inputs, made, strict=True):
        started.equal(rows, [ids, ids[:1]])


async def many(started: Started) -> None:
    """More inputs in one call than the engine runs at once."""
    inputs = [[number % 900 + 20, number // 900 + 20] for number in range(150)]
    made = await started.run(inputs)
    started.equal(made[-3:], inputs[-3:])


async def longest(started: Started) -> None:
    """The longest input is answered; a longer one, or an empty one, ends nothing."""
    most = started.info.max_input_tokens
    ids = [number % 900 + 20 for number in range(most + 1)]
    started.equal(await started.run([ids[:most]]), [ids[:most]])
    for bad in (ids, []):
        with pytest.raises(InvalidRequestError):
            await started.run([[5], bad, [6]])
    started.equal(await started.run([[5]]), [[5]])


async def cancelled(started: Started) -> None:
    """A cancelled call is dropped, and the next one answered."""
    call = asyncio.ensure_future(started.run([[20] * 100] * 300))
    await until(lambda: _busy(started))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    started.equal(await started.run([[7, 8]]), [[7, 8]])
    await until(lambda: _idle(started))


async def _busy(started: Started) -> bool:
    load = await started.embedder.load()
    return load.running_requests + load.queued_requests > 0


async def _idle(started: Started) -> bool:
    return not await _busy(started)


async def probes(started: Started) -> None:
    before = started.embedder.progress(0)
    await started.embedder.probe(0)
    assert started.embedder.progress(0) != before
    probe = asyncio.ensure_future(started.embedder.probe(0))
    await asyncio.sleep(0)
    probe.cancel()
    await asyncio.wait({probe})
    await started.embedder.probe(0)


async def death(started: Started) -> None:
    """Open calls fail, the worker is told once, later calls fail."""
    if isinstance(started.embedder, TransformersEmbedder):
        return  # it has no process of its own
    calls = [asyncio.ensure_future(started.run([[20] * 100] * 300)) for _ in range(2)]
    await until(lambda: _busy(started))
    started.die()
    for call in calls:
        with pytest.raises(EngineFailedError):
            await call
    await until(lambda: bool(started.failures))
    with pytest.raises(EngineFailedError):
        await started.run([[5]])
    with pytest.raises(EngineFailedError):
        await started.embedder.probe(0)
    (failure,) = started.failures
    assert isinstance(failure, EngineFailedError)


async def closing(started: Started) -> None:
    await started.embedder.close()
    await started.embedder.close()
    with pytest.raises(EngineFailedError):
        await started.run([[5]])
    assert len(started.failures) == (0 if started.kind in TRANSFORMERS else 1)


CHECKS: dict[str, Callable[[Started], Awaitable[None]]] = {
    check.__name__: check
    for check in (info, results, overlapping, many, longest, cancelled, probes, death, closing)
}


def _embedder(model: Path, kind: str) -> Embedder:
    if kind in TRANSFORMERS:
        return TransformersEmbedder(VectorModelConfig(model_path=model, device="cpu"))
    if kind not in SIMULATED and importlib.util.find_spec("vllm") is not None:
        return VllmEmbedder(VllmEngineConfig(model_path=str(model), role=Role.EMBEDDING))
    if kind in SIMULATED:
        ranks = kind == "simulated_ranker"
        return SimulatedEmbedder(replace(_SIMULATED, embeds=not ranks, ranks=ranks))
    return SglangEmbedder(
        SglangEngineConfig(
            model_path=str(model), role=Role.EMBEDDING, max_total_tokens=_POOL.get(kind)
        )
    )


async def run_all(model: Path, kind: str) -> dict[str, str]:
    """Start one embedder, run every check, and return what failed: empty for success."""
    embedder = _embedder(model, kind)
    failures: list[ServingError] = []
    try:
        told = await embedder.start(failures.append)
        await embedder.warm_up()
        started = Started(embedder, told, kind, model, failures)
        return {name: await _outcome(check, started) for name, check in CHECKS.items()}
    finally:
        await embedder.close()


async def _outcome(check: Callable[[Started], Awaitable[None]], started: Started) -> str:
    try:
        async with asyncio.timeout(60):
            await check(started)
    except (Exception, pytest.fail.Exception):  # noqa: BLE001 - the test shows it
        return traceback.format_exc()
    return ""


def main() -> None:
    # Everything else that prints goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model, kind = sys.argv[1:]
    json.dump(asyncio.run(run_all(Path(model), kind)), out)
    out.flush()


if __name__ == "__main__":
    main()
