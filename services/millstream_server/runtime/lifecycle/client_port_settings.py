"""Settings of a service whose port clients reach: what they may send, open and hold."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from millstream_server.runtime.rpc.channel import is_loopback
from millstream_server.runtime.settings import SettingsError, setting
from millstream_server.runtime.transport.options import TransportOptions

_is_origin = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9._-]+(?::[0-9]+)?|https?://\[[0-9a-f:]+\](?::[0-9]+)?"
).fullmatch
"""Lower case, without a path."""
_is_host = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:]+\]").fullmatch
_LEAST = 100
"""Of a share of the streams: a connection should take as many RPCs (RFC 9113, 6.5.2)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientPortSettings(ServiceSettings):
    """Of a Processor."""

    max_receive_bytes: int = setting(
        4 << 20, help="largest message or HTTP body taken from a client, in bytes (4 MiB)"
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins whose pages may call this port by a browser, https://app.example,…, or * "
        "for all pages (docs/browsers.md)",
    )
    hosts: tuple[str, ...] = setting(
        (),
        help="names besides localhost that HTTP requests may be for where --listen is a loopback "
        "address, without ports, or * for all (docs/browsers.md)",
    )
    max_open_streams: int = setting(
        10_240,
        help="most RPCs open at once; connections, RPCs of one connection and resets have shares "
        "of it (docs/operations.md)",
    )
    max_open_bytes: int = setting(
        512 << 20,
        help="most bytes of messages that open RPCs hold, of files in conversations, of requests "
        "on streams of images, videos and vectors, and of all output that clients have not read, "
        "each (512 MiB); other limits are shares of it (docs/operations.md)",
    )
    max_connection_age_s: float = setting(
        1800.0,
        help="a client's connection is asked to end after this, so that clients that resolve names "
        "spread over new replicas; its RPCs end after three times this; 0: never",
    )

    def transport(self) -> TransportOptions:
        """Return the bounds of the port that clients reach."""
        streams, room = self.max_open_streams, self._under_way_bytes
        resets = _share(streams, 1, 10)
        return TransportOptions(
            max_receive_bytes=self.max_receive_bytes,
            cors_origins=self.origins(),
            hosts=self.names(),
            max_open_streams=streams,
            max_streams=_share(streams, 2, 5),
            max_connections=_share(streams, 4, 5),
            max_connections_per_address=_share(streams, 2, 5),
            max_resets=resets,
            resets_per_s=resets / 10,
            max_received_bytes=room,
            max_unsent_bytes=room,
            max_connection_age_s=self.max_connection_age_s,
            max_connection_age_grace_s=2 * self.max_connection_age_s,
        )

    @property
    def _under_way_bytes(self) -> int:
        """Half of the memory: 64 of the largest messages at once; never less than one."""
        return max(self.max_open_bytes // 2, self.max_receive_bytes)

    def origins(self) -> frozenset[str]:
        """Parse `cors_origins`.

        Raises:
            SettingsError: one is no origin.
        """
        for origin in self.cors_origins:
            if origin != "*" and not _is_origin(origin):
                why = "is neither * nor an origin as browsers send it: https://app.example"
                raise SettingsError(f"--cors-origins: {origin!r} {why}")
        return frozenset(self.cors_origins)

    def names(self) -> frozenset[str] | None:
        """Parse `hosts`; None where any are taken.

        Raises:
            SettingsError: one is no name of a host.
        """
        for host in self.hosts:
            if host != "*" and not _is_host(host):
                why = "is neither * nor a host as browsers send it, without a port: app.example"
                raise SettingsError(f"--hosts: {host!r} {why}")
        return frozenset(self.hosts) if is_loopback(self.listen) else None


def _share(number: int, part: int, whole: int) -> int:
    """Return a share of a number, or the least: the number itself bounds all of them anyway."""
    return max(_LEAST, number * part // whole)
