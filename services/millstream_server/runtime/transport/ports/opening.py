"""A new connection until it is known what it speaks: TLS, then HTTP/2 or HTTP/1.1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from millstream_server.runtime.ledger import Place
from millstream_server.runtime.security.tls_context import H2

_HTTP_2 = b"PRI"
"""How every connection of HTTP/2 begins; no method of HTTP/1.1 is called that."""

Speaker = Callable[[Place], asyncio.Protocol]
"""Makes the protocol that serves a connection and frees its place in `connection_lost`."""


class Opening(asyncio.Protocol):
    """Waits for a connection's first bytes, and gives it to the protocol that understands them.

    With TLS the client chooses in its handshake (ALPN): without h2 it is HTTP/1.1.
    """

    def __init__(self, place: Place, http2: Speaker, http1: Speaker, limit_s: float) -> None:
        """Wait for ``limit_s`` at most, once the handshake is over."""
        self._place = place
        self._speakers = (http1, http2)
        self._limit_s = limit_s
        self._received = b""
        self._transport: Any = None
        self._timer: asyncio.TimerHandle | None = None
        self._given = False

    def connection_made(self, transport: Any) -> None:
        """Wait for the first bytes."""
        self._transport = transport
        self._place.give_up = transport.abort
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limit_s, transport.abort)

    def data_received(self, data: bytes) -> None:
        """Give the connection away, or wait for more bytes."""
        self._received += data
        speaks_http2 = self._speaks_http2()
        if speaks_http2 is None:
            return
        self._stop_waiting()
        self._given = True
        protocol = self._speakers[speaks_http2](self._place)
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        protocol.data_received(self._received)

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        self._stop_waiting()
        if not self._given:
            self._place.free()

    def _speaks_http2(self) -> bool | None:
        secured = self._transport.get_extra_info("ssl_object")
        if secured is not None:
            return bool(secured.selected_alpn_protocol() == H2)
        start = self._received[: len(_HTTP_2)]
        if start == _HTTP_2:
            return True
        return None if _HTTP_2.startswith(start) else False

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
