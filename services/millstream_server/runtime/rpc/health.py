"""`grpc.health.v1.Health`, for load balancers, probes and channels.

It replaces grpcio's asyncio servicer, which has no `List`, stops updating a watcher when another
one ends, delays a stop for its whole grace and starts as SERVING.

`Check` and `List` fail with the health protocol's codes, without an `ErrorReason` (`StatusError`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream_server.runtime.errors import (
    Code,
    InvalidRequestError,
    StatusError,
    UnavailableError,
)
from millstream_server.runtime.rpc.call import SMALL_REQUEST_BYTES, Call, max_request_bytes
from millstream_server.runtime.rpc.ledger import Shares

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""SERVING as long as the process responds; the only name for a Kubernetes liveness probe."""
ACCEPTING = "accepting"
"""SERVING from when the service's port is open until the drain begins: the name for the health
checks of gRPC clients that balance. A server that can't serve for another reason, such as a
Processor without workers, says so in the error of a call; a client that leaves the server out would
only see its own deadline pass."""
UNKNOWN_NAME = (
    "this server knows no service of that name; grpc.health.v1.Health/List names those it knows"
)
MAX_NAME = 256
"""Longest name in a request. Callers aren't authenticated."""
MAX_WATCHES = 4096
"""Of all callers: one per client channel. An open one takes 8 KB, 27 KB on grpc.aio."""
MAX_LISTED = 100
"""Most names that `List` returns; above, the protocol requires RESOURCE_EXHAUSTED."""

_Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True, slots=True)
class Health:
    """What probes by HTTP are told."""

    states: Mapping[str, bool]
    """Of each name; True is SERVING."""
    conditions: Sequence[str] = ()
    """Why the process doesn't serve, `HealthConditions.holding`."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health by name; every name but `liveness` and `accepting` is NOT_SERVING until `set`.

    May be added to several servers of a process. All calls come from one event loop.
    """

    def __init__(
        self, names: Iterable[str], conditions: Callable[[], Sequence[str]] = tuple
    ) -> None:
        """Start with ``names``, the whole server (""), `liveness` and `accepting`.

        ``conditions`` returns why the process doesn't serve.
        """
        self._conditions = conditions
        self._serving = {"": False, **dict.fromkeys(names, False), LIVENESS: True, ACCEPTING: True}
        self._watches: dict[str, set[asyncio.Event]] = {}
        self._shares = Shares(MAX_WATCHES, "health watches")
        self._draining = False
        self._closed = False

    def set(self, *names: str, serving: bool) -> None:
        """Set the health of ``names``; without names of all but `liveness` and `accepting`.

        A new name is added. During a drain no name becomes SERVING.
        """
        for name in names or self._serving.keys() - {ACCEPTING}:
            if name != LIVENESS:
                self._serving[name] = serving and not self._draining
                self._wake(name)

    def begin_drain(self) -> None:
        """Set every name but `liveness` to NOT_SERVING for good; open Watches report it."""
        self._draining = True
        self.set(serving=False)
        self.set(ACCEPTING, serving=False)

    def close(self) -> None:
        """Drain, then end every Watch; else each would delay `grpc.aio.Server.stop` by its grace.

        They end with UNAVAILABLE, after NOT_SERVING. A channel with `healthCheckConfig` then
        watches again and meanwhile uses another backend. After UNIMPLEMENTED it would stop checking
        and take the backend for healthy; OK has the same effect as UNAVAILABLE, but hides from
        other clients that the last state is out of date. A later Watch ends with UNAVAILABLE
        without a message: then channels back off before they retry.
        """
        self.begin_drain()
        self._closed = True
        for name in self._watches:
            self._wake(name)

    @property
    def states(self) -> Mapping[str, bool]:
        return dict(self._serving)

    @property
    def told(self) -> Health:
        return Health(self.states, self._conditions())

    def _wake(self, name: str) -> None:
        for changed in self._watches.get(name, ()):
            changed.set()

    @max_request_bytes(SMALL_REQUEST_BYTES)
    async def Check(self, request: Any, call: Call) -> Any:  # noqa: N802 - the proto's names
        """Return a name's health.

        Raises:
            InvalidRequestError: the name is too long.
            StatusError: NOT_FOUND: the name was never set.
        """
        _check_name(request.service)
        if request.service not in self._serving:
            raise StatusError(Code.NOT_FOUND, UNKNOWN_NAME)
        return _Status(status=self._status(request.service))

    @max_request_bytes(SMALL_REQUEST_BYTES)
    async def List(self, request: Any, call: Call) -> Any:  # noqa: N802
        """Return the health of every name.

        Raises:
            StatusError: RESOURCE_EXHAUSTED: there are too many.
        """
        if len(self._serving) > MAX_LISTED:
            raise StatusError(
                Code.RESOURCE_EXHAUSTED,
                f"this server knows more than {MAX_LISTED} services; ask for one with Check",
            )
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=self._status(name)) for name in self._serving}
        )

    @max_request_bytes(SMALL_REQUEST_BYTES)
    async def Watch(self, request: Any, call: Call) -> AsyncIterator[Any]:  # noqa: N802
        """Send a name's health at once and after every change; a slow reader gets the latest only.

        A name is SERVICE_UNKNOWN until it is set.

        Raises:
            InvalidRequestError: the name is too long.
            OverloadedError: too many Watches are open already, of this caller or in sum.
            UnavailableError: the servicer was closed.
        """
        _check_name(request.service)
        with self._shares.share(call), self._watching(request.service) as changed:
            last, ended = None, self._closed
            while not ended:
                changed.clear()
                ended, status = self._closed, self._status(request.service)
                if status != last:
                    yield _Status(status=status)
                    last = status
                elif not ended:
                    await changed.wait()
        raise UnavailableError("this server is shutting down")

    @contextlib.contextmanager
    def _watching(self, name: str) -> Iterator[asyncio.Event]:
        changed = asyncio.Event()
        self._watches.setdefault(name, set()).add(changed)
        try:
            yield changed
        finally:
            watches = self._watches[name]
            watches.remove(changed)
            if not watches:  # callers may send any name: drop names without Watches
                del self._watches[name]

    def _status(self, name: str) -> int:
        if name not in self._serving:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if self._serving[name] else _Status.NOT_SERVING)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME:
        raise InvalidRequestError.of("service", f"at most {MAX_NAME} characters")
