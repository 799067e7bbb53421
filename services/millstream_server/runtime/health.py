"""`grpc.health.v1.Health`: what load balancers, probes and channels are told about this process.

grpcio's own asyncio servicer has no `List`, lets a watcher go deaf when another one leaves, holds
a stop for its whole grace and calls a server healthy that has loaded nothing; hence this one.

What `Check` and `List` refuse has the health protocol's codes and no `ErrorReason` of ours, so they
end through the context.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream_server.runtime.errors import (
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)

SERVICE_NAME = "grpc.health.v1.Health"
LIVENESS = "liveness"
"""SERVING as long as the process answers: kubelet restarts a container by it, and only by it."""
MAX_NAME = 256
"""Longest name asked for; more than any service has, and anyone may ask."""
MAX_WATCHES = 16_384
MAX_LISTED = 100
"""Names `List` answers with; beyond, the protocol wants RESOURCE_EXHAUSTED."""

_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Health by name; everything but `liveness` is NOT_SERVING until `set` says otherwise.

    May be added to several servers of a process. All calls come from one event loop.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Answer for ``names``, for the whole server ("") and for `liveness`."""
        self._serving = {"": False, **dict.fromkeys(names, False), LIVENESS: True}
        self._watches: dict[str, set[asyncio.Event]] = {}
        self._draining = False
        self._closed = False

    def set(self, *names: str, serving: bool) -> None:
        """Change what is said of ``names``; of all but `liveness` when none is given.

        A name not known yet becomes known. During a drain nothing turns SERVING any more.
        """
        for name in names or tuple(self._serving):
            if name != LIVENESS:
                self._serving[name] = serving and not self._draining
                self._wake(name)

    def begin_drain(self) -> None:
        """Turn everything but `liveness` NOT_SERVING for good; open Watches stay and are told."""
        self._draining = True
        self.set(serving=False)

    def close(self) -> None:
        """Drain, then end every Watch, so that none holds `grpc.aio.Server.stop` for its grace.

        They end with UNAVAILABLE, after their NOT_SERVING. A channel with `healthCheckConfig` then
        watches anew and meanwhile picks another backend. UNIMPLEMENTED would make it stop checking
        and believe the backend healthy; OK would tell it no more than UNAVAILABLE, and hides from a
        plain client that the state it holds is stale. A Watch that comes later gets UNAVAILABLE
        without a message: after a message channels try again at once, without one they back off.
        """
        self.begin_drain()
        self._closed = True
        for name in self._watches:
            self._wake(name)

    @property
    def states(self) -> Mapping[str, bool]:
        """What is said of each name: true is SERVING."""
        return dict(self._serving)

    @property
    def watch_count(self) -> int:
        """How many Watches are open."""
        return sum(map(len, self._watches.values()))

    def _wake(self, name: str) -> None:
        for changed in self._watches.get(name, ()):
            changed.set()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 - the proto's names
        """Answer at once; NOT_FOUND for a name nobody set.

        Raises:
            InvalidRequestError: the name is too long to be one.
        """
        _check_name(request.service)
        if request.service not in self._serving:
            await context.abort(
                grpc.StatusCode.NOT_FOUND,
                "this server knows no service of that name; grpc.health.v1.Health/List names those "
                "it knows",
            )
        return _Status(status=self._status(request.service))

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """Answer for every name."""
        if len(self._serving) > MAX_LISTED:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"this server knows more than {MAX_LISTED} services; ask for one with Check",
            )
        return health_pb2.HealthListResponse(
            statuses={name: _Status(status=self._status(name)) for name in self._serving}
        )

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer at once and with every change; changes a slow reader missed come as the last one.

        A name nobody set is SERVICE_UNKNOWN until somebody sets it.

        Raises:
            InvalidRequestError: the name is too long to be one.
            OverloadedError: too many watch already.
            UnavailableError: the servicer was closed.
        """
        _check_name(request.service)
        if self.watch_count >= MAX_WATCHES:
            raise OverloadedError("too many watch this server's health", retry_delay_s=10.0)
        with self._watching(request.service) as changed:
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
        """Register an event that is set when ``name`` may have changed."""
        changed = asyncio.Event()
        self._watches.setdefault(name, set()).add(changed)
        try:
            yield changed
        finally:
            watches = self._watches[name]
            watches.remove(changed)
            if not watches:  # anyone may ask for any name: keep none that nobody watches
                del self._watches[name]

    def _status(self, name: str) -> int:
        if name not in self._serving:
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.SERVING if self._serving[name] else _Status.NOT_SERVING)


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME:
        raise InvalidRequestError.of("service", f"at most {MAX_NAME} characters")
