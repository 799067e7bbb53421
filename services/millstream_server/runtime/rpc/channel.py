"""Arguments of our gRPC channels and servers: each number with its reason."""

from __future__ import annotations

import ipaddress
import re
from typing import Any

import grpc

from millstream_server.runtime.security.tls import ClientTls

ChannelArguments = list[tuple[str, Any]]

# A peer that is gone without closing (node lost, no RST) is detected after 10 + 5 s. A shorter
# interval wakes every idle connection more often; 5 s are longer than a garbage collection there.
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
# Half our clients' interval: with the same on both sides a ping that comes a little early counts as
# a strike, and the third one ends an idle connection with too_many_pings. gRPC's default: 5
# minutes.
MIN_PING_INTERVAL_S = KEEPALIVE_S / 2
# The server's own pings detect clients that are gone, to free what their streams hold. No request
# waits for that, and more frequent pings would wake phones: a minute is enough.
SERVER_KEEPALIVE_S = 60.0
SERVER_KEEPALIVE_TIMEOUT_S = 20.0
# Streams per connection: several times what one process serves. gRPC's default, 2^31 - 1, would let
# one client fill our memory. Further streams wait in the client; admission refuses with a reason.
MAX_CONCURRENT_STREAMS = 4096
# RPCs that have arrived and that the event loop has not accepted yet. Above gRPC's default of
# 1,000, which a burst can reach, gRPC drops some at random; their clients get CANCELLED or INTERNAL
# "Internal error from Core". With this limit they wait; admission refuses with a reason.
MAX_PENDING_RPCS = 32_768
# Enough for a key, trace context and W3C baggage (8 KiB at most). It is used for both of gRPC's
# limits, soft and hard: between the two gRPC refuses at random.
MAX_METADATA_BYTES = 16 << 10
# The largest message of a slot stream to a worker. A larger one than the worker takes would end the
# stream, and every other request on it: workers take this much, Processors send no more.
MAX_WORKER_MESSAGE_BYTES = 64 << 20
# Reconnect soon after a worker's restart. gRPC's default is 1 s to 120 s.
RECONNECT_FIRST_S = 0.2
RECONNECT_MOST_S = 2.0
# For an attempt to connect: TCP, TLS and HTTP/2's first frame, which a busy event loop sends late.
# gRPC calls it the least back-off. A worker that isn't there refuses at once.
CONNECT_TIMEOUT_S = 5.0

_SCHEME = re.compile(r"(dns:(//[^/]*/)?|ipv4:|ipv6:)")


def channel_options(
    *,
    max_receive_bytes: int,
    keepalive_s: float = KEEPALIVE_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> ChannelArguments:
    """Return the arguments of a channel between two of our services."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),  # the receiver sets the limit
        *_keepalive(keepalive_s, keepalive_timeout_s),
        # Also without open RPCs, so that a lost peer is detected before the next request.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", _ms(RECONNECT_FIRST_S)),
        ("grpc.min_reconnect_backoff_ms", _ms(CONNECT_TIMEOUT_S)),
        ("grpc.max_reconnect_backoff_ms", _ms(RECONNECT_MOST_S)),
        # Channels with equal arguments would share a connection and its back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(
    *,
    max_receive_bytes: int,
    max_concurrent_streams: int = MAX_CONCURRENT_STREAMS,
    min_ping_interval_s: float = MIN_PING_INTERVAL_S,
    keepalive_s: float = SERVER_KEEPALIVE_S,
    keepalive_timeout_s: float = SERVER_KEEPALIVE_TIMEOUT_S,
) -> ChannelArguments:
    """Return the arguments of a worker's server, or of an admin port.

    Connections have no age: a worker's stream carries the requests of many clients.
    """
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        # What a client may send ahead of its handler, in each stream, beyond the message that is
        # being read. gRPC would raise it to megabytes: a gigabyte for a hundred uploads at once.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 64 << 10),
        # Else two servers on one port would share its connections instead of the second failing.
        ("grpc.so_reuseport", 0),
        # gRPC's macro for it is called MIN_RECV_PING_INTERVAL…; an argument of that name has no
        # effect.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(min_ping_interval_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        *_keepalive(keepalive_s, keepalive_timeout_s),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        ("grpc.server.max_pending_requests", MAX_PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_RPCS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]


def open_channel(
    address: str,
    tls: ClientTls | None,
    *,
    options: ChannelArguments,
) -> grpc.aio.Channel:
    """Open a channel with `channel_options`; ``tls`` reads its files now."""
    chosen = list(options)
    if is_loopback(address):
        # gRPC would send these too through the proxy that the environment names.
        chosen.append(("grpc.enable_http_proxy", 0))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=chosen)
    if tls.server_name:
        chosen.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, tls.credentials(), options=chosen)


def _keepalive(interval_s: float, timeout_s: float) -> ChannelArguments:
    return [
        ("grpc.keepalive_time_ms", _ms(interval_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        # Without this argument the time-out above has no effect: grpcio 1.85 waits a minute for an
        # ack.
        ("grpc.http2.ping_timeout_ms", _ms(timeout_s)),
        ("grpc.http2.max_pings_without_data", 0),  # gRPC's default of 2 stops pings when idle
    ]


def is_loopback(address: str) -> bool:
    """Return whether an address, HOST:PORT or a gRPC target, is a loopback address."""
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
