"""What an RPC and its parts use of the connection that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from h2.errors import ErrorCodes

from millstream_server.runtime.security.certificate_names import CertificateName
from millstream_server.runtime.transport.bounds import Bounds
from millstream_server.runtime.transport.h2_state import ServerState
from millstream_server.runtime.transport.headers import Header
from millstream_server.runtime.transport.keepalive import Keepalive
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.outbox import Outbox


class Carrier(Protocol):
    """A `Connection`. All calls come from the event loop's thread."""

    loop: asyncio.AbstractEventLoop
    options: TransportOptions
    peer: str
    caller_key: str
    certificate_names: Sequence[CertificateName] | None
    h2: ServerState
    out: Outbox
    keepalive: Keepalive
    bounds: Bounds
    """It holds what its RPCs hold."""
    work_begun_s: float
    """About what requests will take whose messages have come in this slice; RPCs add theirs."""

    def send_headers(self, stream_id: int, headers: Sequence[Header], *, end: bool) -> None:
        """Send headers or, with ``end``, trailers; then the stream is over on both sides."""

    def reset(self, stream_id: int, code: ErrorCodes) -> None:
        """End a stream without a status."""

    def credit(self, stream_id: int, nbytes: int) -> None:
        """Let the caller send more on a stream."""

    def awaits_message(self, stream_id: int) -> None:
        """Watch that an RPC's first message comes in time."""

    def heard(self, stream_id: int, *, message: bool) -> None:
        """Note that an RPC's first message has come; not ``message``: it has ended without."""

    def over(self, stream_id: int) -> None:
        """Forget an RPC that is over; may be called twice."""
