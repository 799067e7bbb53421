"""Operations on one of two workers while a Processor sends both requests: none of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from safetensors.numpy import save_file

from millstream_server.engines.simulated.state import version_shift
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    VOCAB_SIZE,
    InProcessProcessor,
    processor,
)
from millstream_testing.waiting import until
from tests.support.processor.chats import completion, gather, options
from tests.support.wire.failures import refusal
from tests.support.worker.controlled_worker import (
    DONE,
    ControlledWorker,
    controlled_worker,
    from_disk,
    pb,
)

STEPPING = replace(ALPHABET, step_s=0.002, weight_version="v1")
CLIENTS = 8
TOKENS = 12


@dataclass
class Load:
    """Clients that each ask again as soon as they have an answer."""

    front: InProcessProcessor
    answers: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)
    """Version that is named, and the answer's tokens."""
    failures: list[BaseException] = field(default_factory=list)

    async def client(self) -> None:
        while True:
            asked = completion([5], options(TOKENS, return_token_ids=True, ignore_eos=True))
            try:
                answer = await gather(self.front.stub.Complete(asked))
            except grpc.aio.AioRpcError as error:
                self.failures.append(error)
                return
            assert answer.finished is not None
            tokens = tuple(answer.choices[0].token_ids)
            self.answers.append((answer.finished.weight_version, tokens))

    async def more(self, count: int = 3 * CLIENTS) -> list[tuple[str, tuple[int, ...]]]:
        """Wait for so many further answers; return those."""
        had = len(self.answers)
        await until(lambda: len(self.answers) >= had + count or bool(self.failures))
        assert not self.failures
        return self.answers[had:]


def expected(version: str) -> tuple[int, ...]:
    """Return the answer of this version's weights."""
    step = 1 + version_shift(version, "v1")
    return tuple((5 + step * n) % VOCAB_SIZE for n in range(1, TOKENS + 1))


@contextlib.asynccontextmanager
async def two_under_load(
    tmp_path: Path, text_model: TextModel
) -> AsyncIterator[tuple[ControlledWorker, ControlledWorker, Load]]:
    settings: dict[str, Any] = {
        "config": STEPPING,
        "scripted": False,
        "propagation_s": 0.5,
        "canary_interval_s": 0.1,
    }
    async with (
        controlled_worker(tmp_path, **settings) as one,
        controlled_worker(tmp_path, **settings) as other,
        processor({MODEL: text_model}, [one.settings.listen, other.settings.listen]) as front,
    ):
        load = Load(front)
        clients = [asyncio.ensure_future(load.client()) for _ in range(CLIENTS)]
        try:
            await load.more()
            yield one, other, load
            await load.more()
            assert all(tokens == expected(version) for version, tokens in load.answers)
        finally:
            for client in clients:
                client.cancel()
            await asyncio.wait(clients)


async def _works(one: ControlledWorker) -> None:
    """Wait until the worker has a request."""

    async def has_requests() -> bool:
        return bool((await one.state()).open_requests)

    await until(has_requests)


async def test_memory_is_released_and_taken_again(tmp_path: Path, text_model: TextModel) -> None:
    async with two_under_load(tmp_path, text_model) as (one, _, load):
        released = one.release()
        await released.ended()
        assert list(released.result.released) == [1, 2, 3]
        assert {version for version, _ in await load.more()} == {"v1"}
        assert (await one.state()).open_requests == 0
        resumed = await one.control.ResumeMemory(pb.ResumeMemoryRequest())
        assert list(resumed.resumed) == [1, 2, 3]
        await _works(one)
        await one.control.FlushCache(pb.FlushCacheRequest(drain=True))
        await _works(one)


async def test_weights_are_replaced_worker_by_worker(tmp_path: Path, text_model: TextModel) -> None:
    good, broken = tmp_path / "weights" / "good", tmp_path / "weights" / "broken"
    async with two_under_load(tmp_path, text_model) as (one, other, load):
        for path in (good, broken):
            path.mkdir()
            (path / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
            save_file({"w": np.zeros(64, np.float32)}, path / "model.safetensors")
        whole = (broken / "model.safetensors").read_bytes()
        (broken / "model.safetensors").write_bytes(whole[:-1])

        failed = await refusal(one.control.UpdateWeights(iter(from_disk(broken))))
        assert (failed.code, failed.reason) == (
            grpc.StatusCode.FAILED_PRECONDITION,
            "INVALID_WEIGHTS",
        )
        assert {version for version, _ in await load.more()} == {"v1"}
        update = one.update(from_disk(good))
        await update.ended()
        assert update.progress[-1].bytes_done == update.progress[-1].bytes_total == len(whole)
        await until(lambda: load.answers[-1][0] == "v2" or bool(load.failures))
        await other.update(from_disk(good)).ended()
        assert {version for version, _ in (await load.more())[CLIENTS:]} == {"v2"}
        assert set(load.answers[0][1]) != set(load.answers[-1][1])


async def test_a_paused_workers_requests_go_on_later(tmp_path: Path, text_model: TextModel) -> None:
    async with two_under_load(tmp_path, text_model) as (one, _, load):
        await one.control.Pause(pb.PauseRequest())
        await load.more()  # those of the other worker
        assert await one.conditions() == ["paused"]
        assert (await one.state()).paused
        await one.control.Continue(pb.ContinueRequest())
        await _works(one)


async def test_a_drained_worker_comes_back(tmp_path: Path, text_model: TextModel) -> None:
    async with two_under_load(tmp_path, text_model) as (one, _, load):
        drained = one.drain()
        await drained.ended()
        assert drained.stages[-1] == DONE
        await load.more()
        assert (await one.state()).open_requests == 0
        await one.control.Undrain(pb.UndrainRequest())
        await _works(one)
