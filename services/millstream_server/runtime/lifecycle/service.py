"""What every service process has, made from its settings: server, metrics, admin, tracing, TLS.

`prefill`, `decode` and `processor` add only the servicers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from grpc_health.v1 import health_pb2_grpc
from prometheus_client.registry import Collector

from millstream_server.runtime.lifecycle.admin import (
    SERVICES,
    AdminServer,
    AdminService,
    Subject,
)
from millstream_server.runtime.lifecycle.server import Server, ServerOptions
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.auth import AuthPolicy, PeerIdentities
from millstream_server.runtime.rpc.channel import is_loopback
from millstream_server.runtime.rpc.grpc_server import RpcInterceptor
from millstream_server.runtime.rpc.health import ACCEPTING, SERVICE_NAME, HealthServicer
from millstream_server.runtime.rpc.serving import Rpcs
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.metrics import CERTIFICATE_EXPIRY
from millstream_server.runtime.telemetry.metrics_endpoint import MetricsEndpoint
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.server import H2Server

log = get_log(__name__)

_MOST_PROBES = 1024
"""Connections of probes: several times what the load balancers of one process open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan(ServerOptions):
    """What a service serves; its settings say the certificate and the tracing."""

    services: tuple[str, ...]
    """Full proto names."""
    open_work: Callable[[], Mapping[str, int]]
    """Returns the amount of open work by kind, for operators."""
    admin_services: tuple[AdminService, ...] = ()
    """On the admin address only."""
    collectors: tuple[Collector, ...] = ()
    """Collectors of metrics besides those of `runtime.telemetry.metrics`."""


class Service:
    """Order of calls: constructor, `prepare`, adding of servicers, `listen`, `close`.

    A service that isn't ready for callers at once calls `listen_aside` before `listen`.
    """

    def __init__(
        self, settings: ServiceSettings, name: str, attributes: Mapping[str, str] | None = None
    ) -> None:
        """Read the certificates; no port is open yet.

        ``name`` is the service's name in traces and metrics, such as millstream-decode;
        ``attributes`` are added to its traces.

        Raises:
            SettingsError: a file is missing, or settings contradict each other.
        """
        self._settings = settings
        self._name = name
        self._tls = _server_tls(settings)
        self._admin: AdminServer | None = None
        self._probes: H2Server | None = None
        self._metrics: MetricsEndpoint | None = None
        self._listens_aside = False
        self._collectors: tuple[Collector, ...] = ()
        self.tracing = Tracing.from_settings(
            settings.otlp_endpoint,
            settings.trace_sample_ratio,
            service_name=name,
            attributes=attributes,
        )

    def prepare(self, plan: ServicePlan) -> Server:
        """Make the servers; no port is open yet.

        Raises:
            SettingsError: settings contradict each other.
        """
        settings = self._settings
        self._collectors = plan.collectors
        self.server = Server(plan.services, replace(plan, tls=self._tls, tracing=self.tracing))
        if settings.admin_listen:
            self._admin = self._make_admin(plan)
        if settings.health_listen:
            self._probes = _health_only(self.server.health)
        return self.server

    async def listen(self) -> int:
        """Open all ports, the service's own last and NOT_SERVING; return the service's port.

        Raises:
            OSError: a port can't be bound.
        """
        await self.listen_aside()
        port = await self.server.listen(self._settings.listen)
        self.server.health.set(ACCEPTING, serving=True)
        log.info("listening", on="service", port=port)
        return port

    async def listen_aside(self) -> None:
        """Open the ports for metrics, operators and probes, as `listen` else does.

        The health name `accepting` is NOT_SERVING until `listen` has opened the service's own port.

        Raises:
            OSError: a port can't be bound.
        """
        if self._listens_aside:
            return
        self._listens_aside = True
        self.server.health.set(ACCEPTING, serving=False)
        settings = self._settings
        if settings.metrics_listen:
            self._metrics = MetricsEndpoint(settings.metrics_listen, self._name, self._collectors)
            log.info("listening", on="metrics", port=self._metrics.port)
        if self._admin is not None:
            port = await self._admin.listen(settings.admin_listen)
            log.info("listening", on="admin", port=port)
        if self._probes is not None:
            port = self._probes.bind(settings.health_listen)
            await self._probes.start()
            log.info("listening", on="health", port=port)

    async def close(self, grace_s: float = 0.0) -> None:
        """Close what `listen` opened and send the last spans; may be called in any state.

        Open RPCs are cut after ``grace_s``. If one part fails to close, the others are still
        closed.
        """
        async with contextlib.AsyncExitStack() as parts:  # the last pushed is the first closed
            if self.tracing is not None:
                parts.push_async_callback(self.tracing.shutdown)
            if self._metrics is not None:
                parts.push_async_callback(self._metrics.close)
            if self._admin is not None:
                parts.push_async_callback(self._admin.stop)
            if self._probes is not None:
                parts.push_async_callback(self._probes.stop, None)
            parts.push_async_callback(self.server.stop, grace_s)

    def _make_admin(self, plan: ServicePlan) -> AdminServer:
        tls = _admin_tls(self._settings)
        # Over TLS only the named peers may call; plaintext on loopback without keys is open to all
        # users of this machine.
        peers = PeerIdentities(self._settings.admin_peers, "--admin-peers") if tls else None
        keys = None
        if self._settings.admin_keys:
            keys = ApiKeys(inline=self._settings.admin_keys, variable="MILLSTREAM_ADMIN_KEYS")
        return AdminServer(
            Subject(
                services=plan.services,
                settings=self._settings,
                health=self.server.health,
                open_work=plan.open_work,
            ),
            RpcInterceptor(
                Rpcs(
                    AuthPolicy(keys=keys, peers=peers).layers(),
                    (*SERVICES, *(service.name for service in plan.admin_services)),
                )
            ),
            tls,
            further=plan.admin_services,
        )


def _health_only(health: HealthServicer) -> H2Server:
    """Make a plaintext server that serves health only, for probes without TLS."""
    server = H2Server(
        Rpcs(services=(SERVICE_NAME,)),
        TransportOptions(max_receive_bytes=4096, max_connections=_MOST_PROBES),
        lambda: health.told,
    )
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    return server


def peers_policy(settings: ServiceSettings) -> PeerIdentities | None:
    """Return which client certificates may call; None: all that the client CAs signed, if set.

    Raises:
        SettingsError: names are given, but no CA to verify the certificates.
    """
    if not settings.allowed_peers:
        return None
    if settings.tls_client_ca_file is None:
        raise SettingsError("--allowed-peers: set --tls-client-ca-file, which signs them, too")
    return PeerIdentities(settings.allowed_peers)


def _server_tls(settings: ServiceSettings) -> ServerTls | None:
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None or key is None:
        if cert or key or settings.tls_client_ca_file:
            raise SettingsError("--tls-cert-file and --tls-key-file belong together: set both")
        return None
    tls = ServerTls(TlsFiles(cert, key, settings.tls_client_ca_file))
    CERTIFICATE_EXPIRY.set_function(tls.expiry_timestamp_s)
    return tls


def _admin_tls(settings: ServiceSettings) -> ServerTls | None:
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None or key is None:
        if not is_loopback(settings.admin_listen):
            raise SettingsError(
                f"--admin-listen {settings.admin_listen}: without TLS the admin services listen "
                "on a loopback address only; to open them further set --tls-cert-file and "
                "--admin-peers"
            )
        if settings.admin_peers:
            raise SettingsError(
                "--admin-peers: set --tls-cert-file, --tls-key-file and --admin-client-ca-file, too"
            )
        return None
    ca = settings.admin_client_ca_file or settings.tls_client_ca_file
    if ca is None or not settings.admin_peers:
        raise SettingsError(
            "--admin-listen: over TLS the admin services ask operators for certificates; set "
            "--admin-client-ca-file and --admin-peers"
        )
    return ServerTls(TlsFiles(cert, key, ca), "--admin-client-ca-file")
