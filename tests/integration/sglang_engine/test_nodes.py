"""One model over two processes: SGLang's tensor parallelism, as over two machines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from millstream.v1 import decode_pb2_grpc
from tests.support.engines.bare_sglang import NEW_TOKENS
from tests.support.engines.sglang_requests import PROMPTS
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, stop_all
from tests.support.worker.kv_watch import told
from tests.support.worker.worker_streams import decode_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]


def _rank(rank: int, model: Path, leader: str, log: Path) -> ServiceProcess:
    flags = {
        "model_path": model,
        "nodes": 2,
        "node_rank": rank,
        "leader_address": leader,
        "engine_args": "--tp-size 2",
    }
    env = {
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # a core for each rank
        "GLOO_SOCKET_IFNAME": "lo",
    }
    return ServiceProcess("millstream_server.decode", flags, log, env=env)


@contextlib.asynccontextmanager
async def _pair(model: Path, logs: Path) -> AsyncIterator[tuple[ServiceProcess, ServiceProcess]]:
    leader = f"127.0.0.1:{free_port()}"
    first, second = (_rank(n, model, leader, logs / f"rank-{n}.log").start() for n in (0, 1))
    try:
        await asyncio.gather(first.until_serving(240), second.until_serving(240))
        yield first, second
    finally:
        stop_all(second, first)


async def _answer(leader: ServiceProcess, prompt: list[int]) -> list[int]:
    async with grpc.aio.insecure_channel(leader.address) as channel:
        stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
        await stream.start(0, prompt, max_new_tokens=NEW_TOKENS, temperature=0.0)
        (view,) = await stream.ended(0)
        await stream.drain()
        return view.token_ids


async def test_two_processes_answer_as_one_and_drain_together(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    async with _pair(model, tmp_path) as (first, second):
        assert await _answer(first, PROMPTS[0]) == expected[0]
        await told(first.address, PROMPTS[0], 1)
        second.terminate()
        assert await _answer(first, PROMPTS[1]) == expected[1], "it waits for rank 0"
        assert second.alive
        first.terminate()
        assert await first.until_gone() == 0
        assert await second.until_gone() == 0


@pytest.mark.parametrize("lost", [0, 1])
async def test_the_loss_of_one_is_the_end_of_both(model: Path, lost: int, tmp_path: Path) -> None:
    async with _pair(model, tmp_path) as ranks:
        ranks[lost].kill()
        assert await ranks[1 - lost].until_gone() == 1
