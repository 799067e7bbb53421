"""Settings of the transport that clients reach: bounds, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from millstream_server.runtime.settings import setting
from millstream_server.runtime.transport.options import TransportOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportSettings:
    """How clients are served, and what they may hold together."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "transport": "leave it out: clients are served by Millstream's own transport (ADR 0028)",
    }

    # A phone that wakes up takes seconds for its first packet; whoever says nothing for longer
    # isn't there, and its stream costs memory.
    first_message_s: float = setting(
        30.0, help="longest wait for the first message of a client's stream"
    )
    # Several times what a browser's backend opens, a fraction of --max-open-streams.
    max_connection_streams: int = setting(
        4096, help="most RPCs open on one connection; clients keep further ones back"
    )
    max_connections: int = setting(
        8192, help="most connections of clients; with TLS 50 KB each (400 MB)"
    )
    max_connections_per_address: int = setting(
        4096, help="most connections of one IP address; a load balancer has few addresses"
    )
    # 64 uploads of the largest message at once.
    max_received_bytes: int = setting(
        256 << 20, help="most bytes of requests that are under way, of all clients (256 MiB)"
    )
    max_unsent_bytes: int = setting(
        256 << 20, help="most bytes of responses that clients have not read, of all (256 MiB)"
    )
    # A client's process that ends may reset all that it has open, and not several times a minute.
    max_resets: int = setting(
        1000, help="most RPCs that a connection may reset in a burst, and a tenth of it a second"
    )
    loop_share: float = setting(
        0.5,
        help="share of the event loop's time, 0 to 1, for frames of connections that take more "
        "than their part while others are served",
    )

    def options(
        self,
        *,
        max_receive_bytes: int,
        max_open_streams: int,
        max_connection_age_s: float,
        max_connection_age_grace_s: float,
    ) -> TransportOptions:
        """Return what a server needs."""
        return TransportOptions(
            max_receive_bytes=max_receive_bytes,
            max_open_streams=max_open_streams,
            max_connection_age_s=max_connection_age_s,
            max_connection_age_grace_s=max_connection_age_grace_s,
            first_message_s=self.first_message_s,
            max_streams=self.max_connection_streams,
            max_connections=self.max_connections,
            max_connections_per_address=self.max_connections_per_address,
            max_received_bytes=self.max_received_bytes,
            max_unsent_bytes=self.max_unsent_bytes,
            max_resets=self.max_resets,
            resets_per_s=self.max_resets / 10,
            loop_share=self.loop_share,
        )
