"""Kubernetes as far as an upgrade needs it: Deployments that roll, endpoints of services, DNS.

Pods are processes of this machine (`container`), led by a kubelet (`pod`). Endpoints follow their
changes after a moment, as in a cluster; a terminating pod stays an endpoint of services that
publish pods that aren't ready, and leaves the others at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import os
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream_testing.waiting import until
from tests.support.deploy.cluster.container import Container, Objects
from tests.support.deploy.cluster.dns import DnsServer
from tests.support.deploy.cluster.pod import Pod
from tests.support.deploy.deploy_tools import Manifest, objects
from tests.support.deploy.kube_rules import selects
from tests.support.wire.certificates import Authority

PROPAGATION_S = 0.3
"""From a change of a pod to the endpoints that others see."""
_GRPC_PORT = 50051
_numbers = itertools.count(1)


def pod_address() -> str:
    """Choose a loopback address that nobody uses; a test process gets each one once."""
    while True:
        number = next(_numbers)
        address = f"127.{16 + os.getpid() % 200}.{number // 250}.{1 + number % 250}"
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind((address, _GRPC_PORT))
            return address


@dataclass
class Deployment:
    """One Deployment: rolls from old pods to new ones within its bounds."""

    manifest: Manifest
    cluster: Cluster
    pods: list[Pod] = field(default_factory=list)
    ended: list[Pod] = field(default_factory=list)

    @property
    def name(self) -> str:
        return str(self.manifest["metadata"]["name"])

    @property
    def revision(self) -> str:
        template = json.dumps(self.manifest["spec"]["template"], sort_keys=True)
        return hashlib.sha256(template.encode()).hexdigest()[:8]

    @property
    def rolled_out(self) -> bool:
        """Whether all pods are new and available, and no old one is left."""
        current = [pod for pod in self.pods if pod.revision == self.revision]
        available = [pod for pod in current if self._available(pod)]
        return bool(len(available) == len(self.pods) == self.manifest["spec"]["replicas"])

    def _available(self, pod: Pod) -> bool:
        return pod.available(self.manifest["spec"].get("minReadySeconds", 0))

    def reconcile(self) -> None:
        """Take the steps that the bounds allow now."""
        spec = self.manifest["spec"]
        bounds = spec["strategy"]["rollingUpdate"]
        replicas = spec["replicas"]
        least, most = replicas - bounds["maxUnavailable"], replicas + bounds["maxSurge"]
        live = [pod for pod in self.pods if not pod.deleting]
        new = [pod for pod in live if pod.revision == self.revision]
        old = [pod for pod in live if pod.revision != self.revision]
        for _ in range(min(replicas - len(new), most - len(live))):
            self._create()
        # Old pods that aren't available go first: that takes nothing away.
        waiting = sum(not self._available(pod) for pod in new)
        spare = len(live) - least - waiting
        for pod in [pod for pod in old if not self._available(pod)][: max(0, spare)]:
            pod.delete()
        available = [pod for pod in live if self._available(pod) and not pod.deleting]
        for pod in [pod for pod in old if pod in available][: max(0, len(available) - least)]:
            pod.delete()

    def _create(self) -> None:
        name = f"{self.name}-{self.revision}-{next(self.cluster.counter)}"
        container = self.cluster.container(name, self.manifest["spec"]["template"])
        pod = Pod(container, self.revision, self.cluster.changed.set)
        self.pods.append(pod)
        self.cluster.lives.append(self.cluster.tasks.create_task(self._lead(pod)))

    async def _lead(self, pod: Pod) -> None:
        await pod.run()
        self.pods.remove(pod)
        self.ended.append(pod)
        self.cluster.changed.set()


@dataclass
class Cluster:
    """One namespace. Use `running_cluster`."""

    folder: Path
    models: Path
    tasks: asyncio.TaskGroup
    objects: Objects = field(default_factory=Objects)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    services: dict[str, Manifest] = field(default_factory=dict)
    authority: Authority = field(default_factory=Authority)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    counter: itertools.count[int] = field(default_factory=itertools.count)
    lives: list[asyncio.Task[None]] = field(default_factory=list)
    published: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def workers_file(self) -> Path:
        return self.folder / "workers.txt"

    def apply(self, manifests: Sequence[Manifest]) -> None:
        """Do what `kubectl apply` and cert-manager do: all Deployments begin to roll at once."""
        self.objects.apply(manifests)
        for certificate in objects(manifests, "Certificate"):
            spec = certificate["spec"]
            issued = self.authority.issue(*spec["dnsNames"])
            files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": issued.ca}
            data = {name: pem.decode() for name, pem in files.items()}
            self.objects.secrets.setdefault(spec["secretName"], data)
        self.services |= {m["metadata"]["name"]: m for m in objects(manifests, "Service")}
        for manifest in objects(manifests, "Deployment"):
            name = manifest["metadata"]["name"]
            found = self.deployments.setdefault(name, Deployment(manifest, self))
            found.manifest = manifest
        self._publish()
        self.changed.set()

    def container(self, name: str, template: Manifest) -> Container:
        """Make the container of a pod, with an address; it isn't started."""
        folder = self.folder / name
        folder.mkdir()
        return Container(
            pod_name=name,
            template=template,
            objects=self.objects,
            folder=folder,
            ip=pod_address(),
            workers=self.workers_file,
            models=self.models,
        )

    def pods(self, component: str) -> list[Pod]:
        """List the pods of a role that run, terminating ones too."""
        return [
            pod
            for deployment in self.deployments.values()
            for pod in deployment.pods
            if pod.container.template["metadata"]["labels"]["app.kubernetes.io/component"]
            == component
        ]

    def endpoints(self, service: str) -> tuple[str, ...]:
        """List the addresses that a service would publish now."""
        spec = self.services[service]["spec"]
        selector: dict[str, Any] = {"matchLabels": spec["selector"]}
        early = spec.get("publishNotReadyAddresses", False)
        return tuple(
            pod.container.ip
            for deployment in self.deployments.values()
            for pod in deployment.pods
            if selects(selector, pod.container.template["metadata"]["labels"])
            and (early or (pod.ready and not pod.deleting))
        )

    def _publish(self) -> None:
        self.published = {name: self.endpoints(name) for name in self.services}
        for name, addresses in self.published.items():
            lines = "".join(f"{ip}:{_GRPC_PORT}\n" for ip in addresses)
            file = self.folder / f"{name.rpartition('-')[2]}.txt"
            unfinished = file.with_suffix(".part")
            unfinished.write_text(lines, encoding="utf-8")
            unfinished.replace(file)

    def lookup(self, name: str) -> tuple[str, ...] | None:
        """Resolve SERVICE.NAMESPACE.svc.… as the cluster's DNS does."""
        return self.published.get(name.partition(".")[0])

    async def control(self) -> None:
        """Roll and publish, until cancelled."""
        while True:
            for deployment in list(self.deployments.values()):
                deployment.reconcile()
            self.changed.clear()
            # Also without a change: a pod becomes available by time alone.
            # Not `wait_for`: Python 3.11's loses a cancel that comes with the time-out.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self.changed.wait()
            asyncio.get_running_loop().call_later(PROPAGATION_S, self._publish)

    async def rolled_out(self, within_s: float = 60.0) -> None:
        """Wait until every Deployment has only new pods, all available and published."""
        await until(
            lambda: (
                all(d.rolled_out for d in self.deployments.values())
                and self.published == {name: self.endpoints(name) for name in self.services}
            ),
            within_s,
        )


@contextlib.asynccontextmanager
async def running_cluster(folder: Path, models: Path) -> AsyncIterator[tuple[Cluster, DnsServer]]:
    """Run an empty cluster; its pods are killed at the end."""
    async with asyncio.TaskGroup() as tasks:
        cluster = Cluster(folder, models, tasks)
        async with DnsServer(cluster.lookup) as dns:
            control = tasks.create_task(cluster.control())
            try:
                yield cluster, dns
            finally:
                for task in (control, *cluster.lives):
                    task.cancel()
