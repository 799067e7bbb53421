"""The RPC as servicers and layers see it, independent of the transport.

An RPC method takes one request message, or an `AsyncIterator` of them, and a `Call`. It is an async
generator of responses; or a coroutine that returns the one response or, where there are many, sends
them by the call. It fails by raising a `ServingError`, or a `StatusError` where another protocol
defines the status.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any, Protocol

from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.security.certificate_names import CertificateName


class Source(Protocol):
    """What has messages for a call, and makes each when it can be written."""

    gathers: bool
    """Set while the call can't be written, until it asks again."""

    @property
    def over(self) -> bool:
        """Whether the last message was made."""

    def next(self) -> Any:
        """Make a message of what there is now; None: there is nothing.

        If there is more, call `Call.ready`. The message is serialized before the next call.
        """


class Call(Protocol):
    """One RPC. All calls come from the task that serves it, or from its event loop."""

    caller_key: str
    """Whom bounds by caller count: "ipv4:10.0.0.7", "ipv6:::1" or "unix:"; once the caller is
    authenticated "api_key:alice" or "certificate:spiffe://…", which that layer sets."""

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
    def certificate_names(self) -> Sequence[CertificateName] | None:
        """URI and DNS names of the caller's TLS certificate; None: there is no certificate."""

    @property
    def time_left_s(self) -> float | None:
        """Seconds until the caller's deadline, at least 0; None: there is no deadline."""

    @property
    def all_read(self) -> bool:
        """Whether the caller has closed its side and its last message was read.

        A transport that can't tell before the next read returns False.
        """

    def add_trailer(self, key: str, value: str | bytes) -> None:
        """Send metadata with the status, also an error's; bytes need a key that ends in -bin."""

    def cancel(self) -> None:
        """Cancel the handler, end the RPC with CANCELLED; no effect once the handler has ended."""

    def fail(self, failure: ServingError) -> None:
        """Cancel the handler, end the RPC with this failure; no effect once it has ended.

        What was not sent by then is dropped.
        """

    def write(self, response: Any, /) -> Awaitable[None]:
        """Send a response; wait until the transport has taken it."""

    def ready(self) -> None:
        """Ask the source of `send_from` for its next message as soon as it can be written.

        May be called before `send_from`, and at any time after it; only from the event loop's
        thread.
        """

    async def send_from(self, source: Source) -> None:
        """Send messages of ``source``, each time after `ready`, until it is over; one at a time.

        What the source raises is raised here.
        """
