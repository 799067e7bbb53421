"""The load that real Processors report balances a plain gRPC client with the recommended config."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2_grpc
from millstream_client.service_config import RECOMMENDED
from millstream_testing.waiting import until
from tests.support.processes.simulated_suite import SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.chats import completion, gather, options
from tests.support.wire.long_streams import load_of

KEY = "k" * 32
KEYED = (("authorization", f"Bearer {KEY}"),)
SLOTS, KEPT = 8, 6
"""What a worker runs at once, and how much of that other clients hold at the busy one."""
LONG = 9000
"""Tokens: minutes, at a step of 0.02 s."""
ROUND = 40


def _config(*, out_of_band: bool) -> str:
    """Take the recommended config, less its patience."""
    config = copy.deepcopy(dict(RECOMMENDED))
    policy = config["loadBalancingConfig"][0]["weighted_round_robin"]
    policy |= {"blackoutPeriod": "0s", "weightUpdatePeriod": "0.1s", "oobReportingPeriod": "0.5s"}
    policy["enableOobLoadReport"] = out_of_band
    return json.dumps(config)


class Pair:
    """Two Processors with a worker each, and a client that knows both."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        keys = {"MILLSTREAM_API_KEYS": f"alice:{KEY}"} if metadata else {}
        self.metadata = metadata
        self.made = SimulatedSuite(folder, {"simulated_step_s": 0.02}, env=keys)
        self.idle, self.busy = self._add("idle"), self._add("busy")

    def _add(self, name: str) -> ServiceProcess:
        worker = self.made.add_worker(
            f"worker-{name}", max_running_requests=SLOTS, context_length=LONG * 2
        )
        return self.made.add_processor(name, workers=worker.address, log_level="info")

    @contextlib.asynccontextmanager
    async def kept_busy(self) -> AsyncIterator[None]:
        """Let other clients' chats hold most of the busy one's worker."""
        async with (
            grpc.aio.insecure_channel(self.busy.address) as channel,
            load_of(self.made.services["worker-busy"].address) as load,
        ):
            stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
            asked = completion("A", options(LONG, ignore_eos=True))
            calls = [stub.Complete(asked, metadata=self.metadata) for _ in range(KEPT)]
            reading = [asyncio.ensure_future(gather(call)) for call in calls]
            try:
                await load.until(lambda report: report.running_requests == KEPT, 10)
                yield
                assert not any(chat.done() for chat in reading)
            finally:
                for chat in reading:
                    chat.cancel()
                await asyncio.wait(reading)

    @contextlib.asynccontextmanager
    async def client(self, *, out_of_band: bool) -> AsyncIterator[Any]:
        """Open a channel to both as any gRPC library would; answers a stub."""
        async with grpc.aio.insecure_channel(
            f"ipv4:{self.idle.address},{self.busy.address}",
            options=[("grpc.service_config", _config(out_of_band=out_of_band))],
        ) as channel:
            yield processor_pb2_grpc.ProcessorServiceStub(channel)

    async def at_the_idle_one(self, stub: Any, name: str) -> int:
        """Make ``ROUND`` calls; count those that the idle Processor has a line of in its log."""
        for number in range(ROUND):
            asked = completion("A", options(1), request_id=f"{name}-{number}.")
            await gather(stub.Complete(asked, metadata=self.metadata))
        return self.idle.log.read_text().count(f"request={name}-")


@pytest.mark.parametrize("metadata", [pytest.param(None, id="open"), pytest.param(KEYED, id="key")])
async def test_a_plain_client_leaves_the_busy_processor_alone(
    tmp_path: Path, metadata: Any
) -> None:
    """By the reports of the stream beside the calls, and by those in the calls' trailers."""
    pair = Pair(tmp_path, metadata)
    with pair.made.running():
        async with pair.kept_busy():
            async with pair.client(out_of_band=True) as stub:
                await _leans(pair, stub, "stream")
            async with pair.client(out_of_band=False) as stub:
                await _leans(pair, stub, "trailer")


async def _leans(pair: Pair, stub: Any, name: str) -> None:
    """Wait until nine calls in ten go to the idle one."""
    rounds: list[int] = []

    async def nearly_all() -> bool:
        rounds.append(await pair.at_the_idle_one(stub, f"{name}-{len(rounds)}"))
        return rounds[-1] >= 0.9 * ROUND

    await until(nearly_all, within_s=12)
    assert sum(rounds) < ROUND * len(rounds), "the busy one was never asked"
