"""Simulated engines with small caches, requests for them, and the events they tell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.operations import NamedTensor
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.engine import SimulatedEngine
from millstream_server.generation.output import CollectingSink, Finish
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Sampling
from millstream_server.kv_cache.events import BlocksStored, KvEvent
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from millstream_server.media.tensor import ElementType, TensorSpec

CONFIG = SimulatedConfig(vocab_size=1000, context_length=128, block_size=4, total_blocks=32)


class Followed:
    """Gathers events."""

    def __init__(self) -> None:
        self.told: list[tuple[int, KvEvent]] = []

    def changed(self, dp_rank: int, events: Sequence[KvEvent]) -> None:
        self.told += [(dp_rank, event) for event in events]


@contextlib.asynccontextmanager
async def running(config: SimulatedConfig) -> AsyncIterator[tuple[SimulatedEngine, Followed]]:
    engine, followed = SimulatedEngine(config), Followed()
    engine.follow_kv(followed)
    info = await engine.start(lambda _: None)
    assert info.tells_kv
    try:
        yield engine, followed
    finally:
        await engine.close()


def asked(token_ids: Sequence[int], max_new_tokens: int = 1, **fields: Any) -> GenerationRequest:
    made = GenerationRequest(
        prompt=Prompt(token_ids), sampling=Sampling(max_new_tokens=max_new_tokens)
    )
    return replace(made, **fields)


async def finished(engine: SimulatedEngine, request: GenerationRequest) -> Finish:
    sink = CollectingSink()
    engine.submit(request, sink)
    return await sink.result()


def stored(token_ids: Sequence[int], first: int = 0, **namespace: str) -> BlocksStored:
    """Return the event of the full blocks of ``token_ids`` from block ``first`` on."""
    hashes = block_hashes(token_ids, 4, Namespace(**namespace))
    parent = hashes[first - 1] if first else None
    return BlocksStored(tuple(hashes[first:]), parent, adapter=namespace.get("adapter", ""))


def submitted(engine: SimulatedEngine, request: GenerationRequest) -> CollectingSink:
    """Submit a request; return where its output goes."""
    sink = CollectingSink()
    engine.submit(request, sink)
    return sink


def controls(engine: SimulatedEngine) -> Any:
    """Return the controls, of which none is missing."""
    return engine.controls


TENSOR = NamedTensor("simulated.weight", TensorSpec(ElementType.FLOAT32, (1,)))
"""The simulated model's only one."""


def without_sleeping(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let `asyncio.sleep` return at once; return the list that gets the seconds asked for."""
    slept: list[float] = []
    sleep = asyncio.sleep

    async def count(delay_s: float) -> None:
        slept.append(delay_s)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", count)
    return slept
