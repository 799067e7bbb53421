"""The RPC as servicers and layers see it, independent of the transport.

An RPC method takes one request message, or an `AsyncIterator` of them, and a `Call`. It is an async
generator of responses, or a coroutine that returns the one response. It fails by raising a
`ServingError`, or a `StatusError` where another protocol defines the status.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Call(Protocol):
    """One RPC. All calls come from the task that serves it, or from its event loop."""

    @property
    def method(self) -> str:
        """The full name, `/package.Service/Method`."""

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """The caller's metadata; keys are lower case."""

    @property
    def peer(self) -> str:
        """The caller's address, as the transport writes it: `ipv4:127.0.0.1:4711`."""

    @property
    def certificate_names(self) -> Sequence[str] | None:
        """URI and DNS names of the caller's TLS certificate; None: there is no certificate."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the caller's deadline, at least 0; None: there is no deadline."""

    def add_trailer(self, key: str, value: str | bytes) -> None:
        """Send metadata with the status, also an error's; bytes need a key that ends in -bin."""

    def cancel(self) -> None:
        """Cancel the handler, end the RPC with CANCELLED; no effect once the handler has ended."""
