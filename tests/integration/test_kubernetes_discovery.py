"""A Processor follows EndpointSlices while workers come and go, and loses no chat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream_client import NO_RETRY, Client
from millstream_testing.waiting import until
from tests.support.processes.processes import complaints
from tests.support.processes.simulated_suite import ALPHABET, MODEL, SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.processor.fake_kubernetes import SERVICE, FakeApiServer, endpoint, endpoint_slice

_CHATS = 8
_TOKENS = 20


class Cluster:
    """Workers as pods: each has a slice of its own, since here they differ in their ports."""

    def __init__(self, suite: SimulatedSuite, api: FakeApiServer, client: Client) -> None:
        self.suite = suite
        self.api = api
        self.client = client
        self.right = 0
        self.over = False

    def name(self, worker: str, **conditions: bool) -> None:
        """Let its slice say that it is there."""
        port = self.suite.services[worker].port
        self.api.put(
            endpoint_slice(
                worker,
                endpoint("127.0.0.1", worker, **conditions),
                ports=[{"name": "grpc", "port": port, "protocol": "TCP"}],
            )
        )

    async def start(self, worker: str) -> ServiceProcess:
        """Start a pod; its address is known before it serves, as with publishNotReadyAddresses."""
        service = self.suite.services[worker].start()
        self.name(worker, ready=True, serving=False, terminating=False)
        await service.until_serving()
        self.name(worker, ready=True, serving=True, terminating=False)
        return service

    async def delete(self, worker: str) -> None:
        """Delete a pod as Kubernetes does: it drains while it is still named."""
        service = self.suite.services[worker]
        self.name(worker, ready=False, serving=True, terminating=True)
        service.terminate()
        self.name(worker, ready=False, serving=False, terminating=True)
        assert await service.until_gone() == 0
        self.api.delete(worker)

    async def connected(self) -> int:
        (model,) = await self.client.models()
        return sum(pool.connected for pool in model.workers)

    async def until_connected(self, count: int) -> None:
        async def holds() -> bool:
            return await self.connected() == count

        await until(holds, 20)

    async def chat(self) -> None:
        while not self.over:
            stream = self.client.chat("hi", model=MODEL, max_new_tokens=_TOKENS)
            assert (await stream.answer()).text == ALPHABET[:_TOKENS]
            self.right += 1

    async def until_more_chats(self) -> None:
        """Wait until every one of the clients was answered anew."""
        wanted = self.right + 2 * _CHATS
        await until(lambda: self.right >= wanted, 20)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with FakeApiServer() as api:
        env = {"KUBECONFIG": str(api.kubeconfig(tmp_path / "kubeconfig"))}
        suite = SimulatedSuite(tmp_path, {"simulated_step_s": 0.01}, env)
        for i in range(3):
            suite.add_worker(f"worker-{i + 1}", propagation_s=0.2)
        front = suite.add_processor("processor", workers=f"k8s:{SERVICE}", log_level="info")
        try:
            async with Client(front.address, retry=NO_RETRY) as client:
                yield Cluster(suite, api, client)
        finally:
            for service in suite.services.values():
                service.kill()
        for service in suite.services.values():
            assert complaints(service.log.read_text()) == []


async def test_workers_come_and_go_through_the_api_and_no_chat_is_lost(cluster: Cluster) -> None:
    front = cluster.suite.services["processor"].start()
    await until(lambda: cluster.api.watching == 1, 30)
    await asyncio.gather(cluster.start("worker-1"), cluster.start("worker-2"))
    await front.until_serving()
    await cluster.until_connected(2)
    async with asyncio.TaskGroup() as chats:
        for _ in range(_CHATS):
            chats.create_task(cluster.chat())
        await cluster.until_more_chats()
        await cluster.start("worker-3")
        await cluster.until_connected(3)
        await cluster.delete("worker-1")
        await cluster.until_connected(2)
        await cluster.until_more_chats()
        await cluster.api.stop()
        await cluster.until_more_chats()
        assert await cluster.connected() == 2
        # What happens meanwhile is seen when the API server is back, in a list.
        started = asyncio.ensure_future(cluster.start("worker-1"))
        await cluster.api.start()
        await started
        await cluster.until_connected(3)
        cluster.api.forget_events()
        await cluster.delete("worker-2")
        await cluster.until_connected(2)
        await cluster.until_more_chats()
        cluster.over = True
    log = front.log.read_text()
    assert "no EndpointSlices of the service yet" in log
    # The connection was lost, and then there was none to be had.
    assert 1 <= log.count("workers not read from Kubernetes") <= 3
