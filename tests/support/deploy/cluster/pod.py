"""A pod's life, as the kubelet leads it: probes, restarts, preStop, SIGTERM, grace, SIGKILL."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.deploy.cluster.container import Container

_POLL_S = 0.02
_BACK_OFF_S = 10.0
"""From the second restart on; the kubelet doubles it each time."""


@dataclass(frozen=True)
class End:
    """How a container ended that was told to."""

    code: int
    took_s: float
    """From SIGTERM."""
    killed: bool
    """Whether it took longer than the grace period."""


async def probe(ip: str, settings: Mapping[str, Any]) -> bool:
    """Probe once as the kubelet does; whether it succeeded within the probe's timeout."""
    action, timeout_s = settings["grpc"], settings.get("timeoutSeconds", 1)
    address = f"{ip}:{action['port']}"
    try:
        async with asyncio.timeout(timeout_s), await _channel(address, action) as channel:
            request = health_pb2.HealthCheckRequest(service=action.get("service", ""))
            answer = await health_pb2_grpc.HealthStub(channel).Check(request)
    except (grpc.aio.AioRpcError, OSError):  # TimeoutError is one of these
        return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _channel(address: str, action: Mapping[str, Any]) -> grpc.aio.Channel:
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
    if action.get("mode") != "TLS":
        return grpc.aio.insecure_channel(address, options)
    # The kubelet takes any certificate: take the one that is shown, under a name that it has.
    host, _, port = address.partition(":")
    shown = await asyncio.to_thread(ssl.get_server_certificate, (host, int(port)))
    names = [("grpc.ssl_target_name_override", _name_in(shown))]
    return grpc.aio.secure_channel(
        address, grpc.ssl_channel_credentials(shown.encode()), options + names
    )


def _name_in(pem: str) -> str:
    from cryptography import x509  # noqa: PLC0415

    certificate = x509.load_pem_x509_certificate(pem.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return names.get_values_for_type(x509.DNSName)[0]


@dataclass
class Pod:
    """One pod. `run` leads its life; `delete` begins its end."""

    container: Container
    revision: str
    on_change: Callable[[], None]
    started: bool = False
    ready_since: float | None = None
    restarts: int = 0
    end: End | None = None
    _deleted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> str:
        return self.container.pod_name

    @property
    def ready(self) -> bool:
        return self.ready_since is not None

    @property
    def deleting(self) -> bool:
        return self._deleted.is_set()

    def available(self, min_ready_s: float) -> bool:
        """Whether it has been ready for as long as the Deployment wants."""
        if self.ready_since is None:
            return False
        return time.monotonic() - self.ready_since >= min_ready_s

    async def probe(self, name: str) -> bool:
        """Run one of the probes: startup, readiness or liveness."""
        return await probe(self.container.ip, self.container.spec[f"{name}Probe"])

    def delete(self) -> None:
        """Let it end in good order."""
        self._deleted.set()
        self._set_ready(ready=False)

    async def run(self) -> None:
        """Start the container, watch it, restart it; end it when the pod is deleted."""
        deleted = asyncio.ensure_future(self._deleted.wait())
        try:
            while not self.deleting:
                self.container.start()
                watch = asyncio.ensure_future(self._watched())
                try:
                    await asyncio.wait({deleted, watch}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    watch.cancel()
                    await asyncio.gather(watch, return_exceptions=True)
                if not self.deleting:
                    self.restarts += 1
                    self.started = False
                    self._set_ready(ready=False)
                    await self._terminate()
                    if self.restarts > 1:
                        await asyncio.wait({deleted}, timeout=_BACK_OFF_S)
            self.end = await self._terminate(pre_stop=True)
        finally:
            deleted.cancel()
            if self.container.alive:
                self.container.kill()
            self.on_change()

    async def _watched(self) -> None:
        """Probe until the container must be restarted, or has ended by itself."""
        process_end = asyncio.ensure_future(self._ended())
        probes = asyncio.ensure_future(self._probed())
        try:
            await asyncio.wait({process_end, probes}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (process_end, probes):
                task.cancel()
            await asyncio.gather(process_end, probes, return_exceptions=True)

    async def _ended(self) -> None:
        while self.container.alive:
            await asyncio.sleep(_POLL_S)

    async def _probed(self) -> None:
        """Return when the container failed its start, or its liveness."""
        if not await self._until_changed("startup", wanted=True):
            return
        self.started = True
        readiness = asyncio.ensure_future(self._readiness())
        try:
            await self._until_changed("liveness", wanted=False)
        finally:
            readiness.cancel()
            await asyncio.gather(readiness, return_exceptions=True)

    async def _readiness(self) -> None:
        while True:
            await self._until_changed("readiness", wanted=True)
            self._set_ready(ready=True)
            await self._until_changed("readiness", wanted=False)
            self._set_ready(ready=False)

    async def _until_changed(self, name: str, *, wanted: bool) -> bool:
        """Probe until the threshold is reached; for the start also until it has failed."""
        settings = self.container.spec[f"{name}Probe"]
        failures = 0
        while True:
            success = await self.probe(name)
            failures = 0 if success else failures + 1
            if success and wanted:
                return True
            if failures >= settings.get("failureThreshold", 3) and (
                not wanted or name == "startup"
            ):
                return False
            await asyncio.sleep(settings.get("periodSeconds", 10))

    def _set_ready(self, *, ready: bool) -> None:
        if ready and self.deleting:
            return
        if ready != self.ready:
            self.ready_since = time.monotonic() if ready else None
            self.on_change()

    async def _terminate(self, *, pre_stop: bool = False) -> End:
        """PreStop, SIGTERM, and SIGKILL when the grace period is over."""
        deadline = (
            time.monotonic() + self.container.template["spec"]["terminationGracePeriodSeconds"]
        )
        hook = self.container.spec.get("lifecycle", {}).get("preStop")
        if hook and pre_stop:
            await asyncio.sleep(hook["sleep"]["seconds"])
        began = time.monotonic()
        self.container.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + deadline - began):
                await self._ended()
        killed = self.container.alive
        assert self.container.process is not None
        code = self.container.kill() if killed else self.container.process.wait()
        return End(code, time.monotonic() - began, killed)
