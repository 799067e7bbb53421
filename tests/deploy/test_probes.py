"""The probes of values-pd.yaml, run as the kubelet runs them, against the containers' processes."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from millstream_client import NO_RETRY, AnswerStream, Client, OverloadedError, Tls, UnavailableError
from millstream_server.runtime.lifecycle.main import CUT_OFF
from millstream_testing.waiting import until
from tests.support.deploy.cluster.cluster import Cluster
from tests.support.deploy.cluster.pod import Pod, probe
from tests.support.deploy.cluster.suite import (
    MODEL,
    ONE_EACH,
    STEP_S,
    cluster,
    live_values,
    until_answered,
)
from tests.support.deploy.deploy_tools import NAMESPACE, RELEASE, Manifest
from tests.support.processes.simulated_suite import ALPHABET

pytestmark = pytest.mark.timeout(120)

Render = Callable[..., list[Manifest]]
PROBES = ("startup", "readiness", "liveness")


def decode(settings: dict[str, Any], **pool: Any) -> dict[str, Any]:
    return {"decode": {"pools": {"main": {"replicas": 1, "settings": settings, **pool}}}}


def only(manifests: Sequence[Manifest], component: str) -> list[Manifest]:
    """Leave the other roles out: they wouldn't matter, and take their time."""
    return [
        manifest
        for manifest in manifests
        if manifest["kind"] != "Deployment"
        or manifest["metadata"]["labels"]["app.kubernetes.io/component"] == component
    ]


async def probed(pod: Pod) -> tuple[bool, ...]:
    """Run startup, readiness and liveness once."""
    return tuple([await pod.probe(name) for name in PROBES])


async def begun(client: Client, tokens: int) -> AnswerStream:
    """Ask for so many tokens, and wait for the first."""
    stream = client.chat("hi", model=MODEL, max_new_tokens=tokens)
    await anext(aiter(stream))
    return stream


async def the_pod(made: Cluster, component: str) -> Pod:
    await until(lambda: bool(made.pods(component)))
    (pod,) = made.pods(component)
    return pod


async def test_a_worker_that_loads_is_alive_and_gets_nothing(
    render: Render, tmp_path: Path
) -> None:
    values = live_values(decode({}, engineArgs={"load_s": 3}))
    async with cluster(tmp_path) as (made, _):
        made.apply(only(render(values=values), "decode"))
        pod = await the_pod(made, "decode")
        await until(lambda: pod.probe("liveness"), 30)
        assert await probed(pod) == (False, False, True)
        assert not pod.started
        await until(lambda: pod.ready, 30)
        assert await probed(pod) == (True, True, True)
        assert pod.restarts == 0


async def test_a_stuck_worker_is_unready_and_later_starts_anew(
    render: Render, tmp_path: Path
) -> None:
    # A step takes longer than the canary may: that is how an engine that hangs looks.
    times = {"canary_interval_s": 3, "canary_timeout_s": 0.5, "stuck_limit_s": 4}
    values = live_values(decode(times, engineArgs={"step_s": 30}))
    async with cluster(tmp_path) as (made, _):
        made.apply(only(render(values=values), "decode"))
        pod = await the_pod(made, "decode")
        await until(lambda: pod.ready, 30)
        await until(lambda: not pod.ready, 30)
        assert (await probed(pod), pod.restarts) == ((False, False, True), 0)
        await until(lambda: pod.restarts == 1, 30)
        await until(lambda: pod.ready, 30)


async def test_a_dead_worker_is_restarted_and_a_frozen_one_is_not_alive(
    render: Render, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as (made, _):
        made.apply(only(render(values=live_values(decode({}))), "decode"))
        pod = await the_pod(made, "decode")
        await until(lambda: pod.ready, 30)
        pod.container.signal(signal.SIGKILL)
        await until(lambda: pod.restarts == 1, 30)
        await until(lambda: pod.ready, 30)
        pod.container.signal(signal.SIGSTOP)
        try:
            assert not await pod.probe("liveness")
        finally:
            pod.container.signal(signal.SIGCONT)
        await until(lambda: pod.probe("liveness"), 30)


async def test_a_full_processor_stays_ready(render: Render, tmp_path: Path) -> None:
    full = {"processor": {"settings": {"max_admitted_requests": 1, "max_queued_requests": 0}}}
    async with cluster(tmp_path) as (made, target):
        made.apply(render(values=live_values(ONE_EACH, full)))
        await made.rolled_out()
        async with Client(target, retry=NO_RETRY) as client:
            await until_answered(client)
            async with await begun(client, tokens=400):
                with pytest.raises(OverloadedError):
                    await client.chat("hi", model=MODEL, max_new_tokens=1).answer()
                for role in ("processor", "prefill", "decode"):
                    assert await probed(await the_pod(made, role)) == (True, True, True)


async def test_a_draining_worker_is_unready_and_alive_until_its_last_token(
    render: Render, tmp_path: Path
) -> None:
    async with cluster(tmp_path) as (made, target), Client(target) as client:
        made.apply(render(values=live_values(ONE_EACH)))
        await made.rolled_out()
        pod = await the_pod(made, "decode")
        chat = await begun(client, tokens=160)
        answer = asyncio.ensure_future(chat.answer())
        seen: set[tuple[bool, ...]] = set()
        pod.delete()
        while pod in made.pods("decode"):
            seen.add(await probed(pod))
            await asyncio.sleep(STEP_S)
        # preStop: nobody has told the process yet. Then it drains. At last nothing listens.
        assert {(True, True, True), (False, False, True)} <= seen
        assert (await answer).text.startswith(ALPHABET)
        assert pod.end is not None
        assert (pod.end.code, pod.end.killed) == (0, False)


async def test_the_grace_period_has_room_for_the_longest_drain(
    render: Render, tmp_path: Path
) -> None:
    short = {"limitSeconds": 2, "preStopSeconds": 1, "propagationSeconds": 0.5}
    values = live_values(
        ONE_EACH, {"poolDefaults": {"drain": short}, "processor": {"drain": short}}
    )
    async with cluster(tmp_path) as (made, target), Client(target, retry=NO_RETRY) as client:
        made.apply(render(values=values))
        await made.rolled_out()
        pods = [await the_pod(made, role) for role in ("processor", "prefill", "decode")]
        endless = await begun(client, tokens=480)
        for pod in pods:
            pod.delete()
        await until(lambda: all(pod.end is not None for pod in pods), 30)
        with pytest.raises(UnavailableError):
            await endless.answer()
        for pod in pods:
            assert pod.end is not None
            assert not pod.end.killed
            spec = pod.container.template["spec"]
            # 10 s are for the clean-up of what was cut off; that is what is left.
            assert pod.end.took_s < spec["terminationGracePeriodSeconds"] - 1
        ends = {pod.name.split("-")[2]: pod.end.code for pod in pods if pod.end}
        assert ends["prefill"] == 0
        # Both have the same time. Whoever is first cuts the request off; the other has none left.
        assert CUT_OFF in (ends["processor"], ends["decode"])
        assert {ends["processor"], ends["decode"]} <= {0, CUT_OFF}


@pytest.mark.parametrize("processor_probes_use_tls", [False, True])
async def test_probes_of_a_suite_with_tls(
    render: Render, tmp_path: Path, *, processor_probes_use_tls: bool
) -> None:
    tls = {
        "enabled": True,
        "certManager": {"issuerRef": {"name": "suite-ca"}},
        "probes": processor_probes_use_tls,
        # In one case operators may use the admin port, in the other there is none.
        "adminPeers": ["operator.example"] if processor_probes_use_tls else [],
    }
    values = live_values(ONE_EACH, {"security": {"tls": tls}})
    async with cluster(tmp_path) as (made, target):
        made.apply(render(values=values))
        await made.rolled_out()
        ca = tmp_path / "ca.pem"
        ca.write_bytes(made.authority.pem)
        name = f"{RELEASE}-millstream-processor.{NAMESPACE}.svc"
        async with Client(target, tls=Tls(ca_file=ca, server_name=name)) as client:
            await until_answered(client)
        for role in ("processor", "prefill", "decode"):
            pod = await the_pod(made, role)
            assert await probed(pod) == (True, True, True)
            own_port_in_plaintext = {"grpc": {"port": 50051, "service": "liveness"}}
            assert not await probe(pod.container.ip, own_port_in_plaintext)
        processor = await the_pod(made, "processor")
        action = processor.container.spec["readinessProbe"]["grpc"]
        wanted = (50051, "TLS") if processor_probes_use_tls else (50052, None)
        assert (action["port"], action.get("mode")) == wanted
