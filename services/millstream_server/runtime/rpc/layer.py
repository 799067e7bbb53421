"""Layers: code that runs around every RPC, independent of servicer and transport.

A layer is entered for each RPC and returns a `Visit`, which is called with each message and at the
end. The order of calls: `enter` of each layer, the outermost first; `received` for each
message, before the servicer gets it; `leave`, the innermost first; then the status is decided and,
for a failure, sent; `ended`, the outermost first. None may block or await.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from millstream_server.runtime.errors import Code
from millstream_server.runtime.rpc.call import Call


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an RPC ended."""

    code: Code
    message: str = ""
    cause: BaseException | None = None
    """The exception; None if there was none, or if the caller cancelled."""


class Visit:
    """One RPC in one layer. Each layer overrides what it needs."""

    __slots__ = ()

    def received(self, message: Any) -> None:
        """Called with each message; an exception refuses it and ends the RPC."""

    def leave(self) -> None:
        """Called when the servicer has ended; may add trailers. An exception ends the RPC."""

    def ended(self, outcome: Outcome) -> None:
        """Called when the status is decided. Must not raise."""


class Layer(Protocol):
    """Code that runs around the handlers of RPCs."""

    def covers(self, method: str) -> bool:
        """Return whether it is entered for `/package.Service/Method`; called once per method.

        For a method that the server does not have, it is called for each RPC.
        """

    def enter(self, call: Call) -> Visit | None:
        """Called at an RPC's start; an exception refuses it. None: no more calls for this RPC."""


def service_of(method: str) -> str:
    """Return `package.Service` of `/package.Service/Method`."""
    return method.rpartition("/")[0].removeprefix("/")
