"""A rolling upgrade of values-pd.yaml, all roles at once, while chats stream and more keep coming.

`deploy.cluster` plays Kubernetes: Deployments roll within their bounds, the kubelet runs probes,
preStop and the grace period, endpoints follow a moment later. The client library resolves the
headless service of ready Processors through DNS.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from millstream_client import Client, MillstreamError
from millstream_testing.waiting import until
from tests.support.deploy.cluster.cluster import Cluster
from tests.support.deploy.cluster.pod import Pod
from tests.support.deploy.cluster.suite import MODEL, cluster, live_values, until_answered
from tests.support.deploy.deploy_tools import Manifest
from tests.support.processes.simulated_suite import ALPHABET

pytestmark = pytest.mark.timeout(120)

CLIENTS = 6
Render = Callable[..., list[Manifest]]


@dataclass
class Chats:
    """Clients that hold one chat after the other; each says how it ended."""

    client: Client
    ended: Counter[str] = field(default_factory=Counter)
    running: int = 0

    async def forever(self, seed: int) -> None:
        for number in range(seed, 1_000_000, 7):
            tokens = 5 + number * 13 % 55
            self.running += 1
            self.ended[await self._one(tokens)] += 1
            self.running -= 1

    async def _one(self, tokens: int) -> str:
        try:
            async with asyncio.timeout(30):
                answer = await self.client.chat("hi", model=MODEL, max_new_tokens=tokens).answer()
        except (MillstreamError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return "OK" if answer.text == ALPHABET[:tokens] else f"said {answer.text!r}"

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        tasks = [asyncio.ensure_future(self.forever(seed)) for seed in range(CLIENTS)]
        try:
            await until(lambda: self.ended.total() >= CLIENTS, 30)
            yield
            more = self.ended.total() + CLIENTS
            await until(lambda: self.ended.total() >= more, 30)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_an_upgrade_of_all_roles_loses_no_request(render: Render, tmp_path: Path) -> None:
    async with cluster(tmp_path) as (made, target), Client(target) as client:
        made.apply(render(values=live_values()))
        await made.rolled_out()
        await until_answered(client)
        chats = Chats(client)
        async with chats.going_on():
            made.apply(render(values=live_values(new_version())))
            assert not any(d.rolled_out for d in made.deployments.values())
            await made.rolled_out()
        assert set(chats.ended) == {"OK"}, chats.ended
        expect_good_ends(made, ended=6)


async def test_a_version_that_never_gets_ready_takes_nothing_away(
    render: Render, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as (made, target), Client(target) as client:
        made.apply(render(values=live_values()))
        await made.rolled_out()
        old = [pod for d in made.deployments.values() for pod in d.pods]
        chats = Chats(client)
        async with chats.going_on():
            made.apply(render(values=live_values(broken_version())))
            # Prefill loads without end; decode and the Processor end at once, again and again.
            await until(lambda: all(len(d.pods) == 3 for d in made.deployments.values()), 30)
            await until(lambda: all(tried_twice(pod) for pod in new_pods(made, old)), 30)
            assert not any(pod.ready for pod in new_pods(made, old))
            assert all(pod.ready and not pod.restarts for pod in old)
            made.apply(render(values=live_values()))
            await made.rolled_out()
        assert set(chats.ended) == {"OK"}, chats.ended
        assert [pod for d in made.deployments.values() for pod in d.pods] == old


def broken_version() -> dict[str, Any]:
    """Values that a render can't tell from good ones: two kinds of processes refuse theirs."""
    return {
        "processor": {"settings": {"max_pace_s": -1}},
        "prefill": {"engineArgs": {"load_s": 600}},
        "decode": {"settings": {"context_length": -1}},
    }


def new_pods(made: Cluster, old: list[Pod]) -> list[Pod]:
    return [pod for d in made.deployments.values() for pod in d.pods if pod not in old]


def tried_twice(pod: Pod) -> bool:
    loading = pod.container.spec["name"] == "prefill"
    return pod.container.alive if loading else pod.restarts > 1


def new_version() -> dict[str, Any]:
    """A change that reaches each pod's template: its configuration, as most upgrades do."""
    return {"poolDefaults": {"settings": {"log_level": "warning"}}}


def expect_good_ends(made: Cluster, ended: int) -> None:
    """Every old pod drained within the time that the chart computed, without a restart."""
    assert sum(len(deployment.ended) for deployment in made.deployments.values()) == ended
    for deployment in made.deployments.values():
        for pod in deployment.ended:
            assert pod.end is not None
            assert (pod.end.code, pod.end.killed, pod.restarts) == (0, False, 0), pod.name
