"""An RPC as servicers and layers see it, independent of the transport.

An RPC method takes one request message, or an `AsyncIterator` of them, and a `Call`. It is an async
generator of responses; or a coroutine that returns the one response or, where there are many, sends
them by the call. It fails by raising a `ServingError`, or a `StatusError` where another protocol
defines the status.

A `Layer` is code that runs around every RPC. It is entered for each RPC and returns a `Visit`,
which is called with each message and at the end. The order of calls: `enter` of each layer, the
outermost first; `received` for each message, before the servicer gets it; `leave`, the innermost
first; then the status is decided and, for a failure, sent; `ended`, the outermost first. None may
block or await.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import unquote

from millstream_server.runtime.errors import Code, ServingError

SMALL_REQUEST_BYTES = 4 << 10
"""For services whose requests are names: gRPC's longest are 1 KiB. Their callers may hold nothing
of admission, a key or a certificate, and reflection sends the request back."""
_NETWORK_BITS = 64
"""Of IPv6 addresses on the Internet: one customer has a whole such network."""

ServicerT = TypeVar("ServicerT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class CertificateName:
    """An entry of a TLS certificate's Subject Alternative Name.

    The kind counts: a CA that lets its users choose DNS names may sign "DNS:spiffe://td/processor",
    which isn't the SPIFFE id.
    """

    kind: Literal["uri", "dns"]
    value: str


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

    __slots__ = tuple[str, ...]()  # so: of `()` mypy concludes that no attribute can be set

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

    def send_from(self, source: Source, /) -> Awaitable[None]:
        """Send messages of ``source``, each time after `ready`, until it is over; one at a time.

        What the source raises is raised here.
        """


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an RPC ended."""

    code: Code
    message: str = ""
    cause: BaseException | None = None
    """The exception; None if there was none, or if the caller cancelled."""


class Visit:
    """One RPC in one layer. Each layer overrides what it needs."""

    __slots__ = tuple[str, ...]()  # so: of `()` mypy concludes that no attribute can be set

    def received(self, message: Any) -> None:
        """Called with each message; an exception refuses it and ends the RPC."""

    def leave(self) -> None:
        """Called when the servicer has ended; may add trailers. An exception ends the RPC."""

    def ended(self, outcome: Outcome) -> None:
        """Called when the status is decided. Must not raise."""


class Layer(Protocol):
    """Code that runs around the handlers of RPCs; see above."""

    def covers(self, method: str) -> bool:
        """Return whether it is entered for `/package.Service/Method`; called once per method.

        For a method that the server does not have, it is called for each RPC.
        """

    def enter(self, call: Call) -> Visit | None:
        """Called at an RPC's start; an exception refuses it. None: no more calls for this RPC."""


def service_of(method: str) -> str:
    """Return `package.Service` of `/package.Service/Method`."""
    return method.rpartition("/")[0].removeprefix("/")


# ---- whom bounds by caller count -----------------------------------------------------------------


def key_of_address(peer: str) -> str:
    """Return the key of a caller known by its address only, without the port.

    ``peer`` is as `Call.peer`: "ipv4:10.0.0.7:4711" -> "ipv4:10.0.0.7", "ipv6:[::1]:4711" ->
    "ipv6:::1". All addresses of a global IPv6 network of 64 bits have one key. Every caller on a
    Unix socket has the key "unix:". Authentication replaces it with the caller's name
    (`runtime.rpc.auth`).
    """
    kind, _, address = peer.partition(":")
    if kind == "ipv4":
        return peer.rpartition(":")[0]
    if kind == "ipv6":
        return _of_ipv6(address.rpartition(":")[0])
    return f"{kind}:"


@lru_cache(4096)
def _of_ipv6(host: str) -> str:
    host = unquote(host).strip("[]")
    try:
        address = ipaddress.IPv6Address(host)
    except ValueError:
        return f"ipv6:{host}"
    if address.ipv4_mapped is not None:
        return f"ipv4:{address.ipv4_mapped}"
    if address.is_global:
        return f"ipv6:{ipaddress.IPv6Network((int(address), _NETWORK_BITS), strict=False)}"
    return f"ipv6:{address}"


# ---- what a servicer says of its methods ---------------------------------------------------------


def max_request_bytes(most: int) -> Callable[[ServicerT], ServicerT]:
    """Let a servicer's method take messages of so many bytes at most, below the server's limit."""

    def limit(servicer: ServicerT) -> ServicerT:
        servicer.max_request_bytes = most  # type: ignore[attr-defined]
        return servicer

    return limit


def after_first_message(servicer: ServicerT) -> ServicerT:
    """Let calls of a method be served when their first message comes, or the end of their requests.

    For methods with many requests; those with one always wait for it. RPCs that stay silent then
    cost no task. Authentication and limits don't wait. On grpc.aio it has no effect.
    """
    servicer.after_first_message = True  # type: ignore[attr-defined]
    return servicer
