"""One model over two processes: SGLang's tensor parallelism, as over two machines."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from millstream.v1 import decode_pb2_grpc
from tests.support.ports import free_port
from tests.support.sglang_requests import PROMPTS
from tests.support.suite import ServiceProcess
from tests.support.worker_streams import decode_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

_NEW_TOKENS = 8


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


async def test_two_processes_answer_as_one(
    model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    leader = f"127.0.0.1:{free_port()}"
    ranks = [_rank(n, model, leader, tmp_path / f"rank-{n}.log").start() for n in (1, 0)]
    follower, first = ranks
    try:
        await asyncio.gather(*(rank.until_serving(240) for rank in ranks))
        async with grpc.aio.insecure_channel(first.address) as channel:
            stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
            await stream.start(0, PROMPTS[0], max_new_tokens=_NEW_TOKENS)
            (view,) = await stream.ended(0)
            assert view.token_ids == expected[0][:_NEW_TOKENS]
            await stream.drain()
        follower.terminate()  # it waits for the leader
        first.terminate()
        assert await first.until_gone() == 0
        assert await follower.until_gone() == 0
    finally:
        for rank in ranks:
            rank.kill()
