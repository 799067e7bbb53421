"""Arguments of our gRPC channels and servers: each number stands here, with its reason."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from typing import Any

import grpc

from millstream_server.runtime.tls import ClientTls

Options = list[tuple[str, Any]]

# A peer that vanishes without a word (node gone, no RST) is noticed in 10 + 5 s. Shorter would cost
# a wake-up more often on every idle connection, and 5 s outlast a pause of the peer's collector.
KEEPALIVE_S = 10.0
KEEPALIVE_TIMEOUT_S = 5.0
# Half our clients' interval: with the same on both sides a ping that comes a little early is a
# strike, and after the third an idle connection ends with too_many_pings. gRPC's own is 5 minutes.
MIN_PING_INTERVAL_S = KEEPALIVE_S / 2
# The server's own pings find dead clients (a laptop that was shut) and free what their streams
# hold. A minute is enough: nobody waits for it, and phones needn't wake for us more often.
SERVER_KEEPALIVE_S = 60.0
SERVER_KEEPALIVE_TIMEOUT_S = 20.0
# Per connection, one stream is one conversation or one worker's stream: several times what one
# process carries. gRPC's own limit is 2^31 - 1, which lets one client open streams until we fall.
# A stream more waits in the client; refusing with a reason is admission's business.
MAX_CONCURRENT_STREAMS = 4096
# RPCs that came in and that the event loop has not taken yet. From gRPC's own 1,000 on, such as
# come in a burst while the loop is busy for a moment, it drops some at random, and their clients
# read CANCELLED or INTERNAL "Internal error from Core". Ours wait; admission refuses with a reason.
MAX_PENDING_RPCS = 32_768
# A key, trace context and W3C baggage (8 KiB at most) fit. Both of gRPC's limits get this number:
# between them it refuses at random.
MAX_METADATA_BYTES = 16 << 10
# A worker that comes back is taken back soon; gRPC's own 1 s to 120 s is for the open internet.
RECONNECT_FIRST_S = 0.2
RECONNECT_MOST_S = 2.0

_SCHEME = re.compile(r"(dns:(//[^/]*/)?|ipv4:|ipv6:)")


def channel_options(
    *,
    max_receive_bytes: int,
    keepalive_s: float = KEEPALIVE_S,
    keepalive_timeout_s: float = KEEPALIVE_TIMEOUT_S,
) -> Options:
    """Arguments of a channel between two of our services."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),  # the receiver sets the limit
        *_keepalive(keepalive_s, keepalive_timeout_s),
        # Also between requests: the next one shall not be the one that finds out.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.initial_reconnect_backoff_ms", _ms(RECONNECT_FIRST_S)),
        ("grpc.min_reconnect_backoff_ms", _ms(RECONNECT_FIRST_S)),
        ("grpc.max_reconnect_backoff_ms", _ms(RECONNECT_MOST_S)),
        # Channels with equal arguments would share a connection, and with it another's back-off.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def server_options(
    *,
    max_receive_bytes: int,
    max_connection_age_s: float = 0.0,
    max_connection_age_grace_s: float = 0.0,
    max_concurrent_streams: int = MAX_CONCURRENT_STREAMS,
    min_ping_interval_s: float = MIN_PING_INTERVAL_S,
    keepalive_s: float = SERVER_KEEPALIVE_S,
    keepalive_timeout_s: float = SERVER_KEEPALIVE_TIMEOUT_S,
) -> Options:
    """Arguments of a server; an age of 0 means for ever.

    An age makes clients of a headless Kubernetes service resolve it again and find new replicas;
    gRPC varies it by 10 % so that they don't all come back together. After age and grace open
    streams are cut, so give an age to a front door, and none to a worker: Processors hold a
    connection to every worker anyway, and one long stream with everybody's requests.
    """
    options: Options = [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", -1),
        # Two servers on one port would share its connections; a taken port must fail.
        ("grpc.so_reuseport", 0),
        # Its macro in C is called MIN_RECV_PING_INTERVAL…; an argument of that name does nothing.
        ("grpc.http2.min_ping_interval_without_data_ms", _ms(min_ping_interval_s)),
        ("grpc.keepalive_permit_without_calls", 1),
        *_keepalive(keepalive_s, keepalive_timeout_s),
        ("grpc.max_concurrent_streams", max_concurrent_streams),
        ("grpc.server.max_pending_requests", MAX_PENDING_RPCS),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_RPCS),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ]
    if max_connection_age_s:
        options.append(("grpc.max_connection_age_ms", _ms(max_connection_age_s)))
        if max_connection_age_grace_s:
            options.append(("grpc.max_connection_age_grace_ms", _ms(max_connection_age_grace_s)))
    return options


def bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None = None
) -> int:
    """Have a server listen on an address, HOST:PORT; without credentials in plaintext.

    Raises:
        OSError: it can't be bound.
    """
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        message = f"can't listen on {address}: is the port taken?"
        raise OSError(message) from error


def open_channel(
    address: str,
    tls: ClientTls | None,
    *,
    options: Options,
    interceptors: Sequence[grpc.aio.ClientInterceptor] = (),
) -> grpc.aio.Channel:
    """Open a channel with `channel_options`; with ``tls``, of what its files hold now."""
    chosen = list(options)
    if is_loopback(address):
        # gRPC would send even these through the proxy that the environment names.
        chosen.append(("grpc.enable_http_proxy", 0))
    if tls is None:
        return grpc.aio.insecure_channel(address, options=chosen, interceptors=interceptors)
    if tls.server_name:
        chosen.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(
        address, tls.credentials(), options=chosen, interceptors=interceptors
    )


def _keepalive(interval_s: float, timeout_s: float) -> Options:
    return [
        ("grpc.keepalive_time_ms", _ms(interval_s)),
        ("grpc.keepalive_timeout_ms", _ms(timeout_s)),
        # Without this one the time-out above has no effect: grpcio 1.85 waits a minute for an ack.
        ("grpc.http2.ping_timeout_ms", _ms(timeout_s)),
        ("grpc.http2.max_pings_without_data", 0),  # gRPC's own limit of 2 stops pings when idle
    ]


def is_loopback(address: str) -> bool:
    """Tell whether an address, HOST:PORT or a gRPC target, is this machine's own."""
    host = _SCHEME.sub("", address).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
