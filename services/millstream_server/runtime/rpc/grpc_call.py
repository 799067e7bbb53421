"""A `Call` on grpc.aio; the only module that uses its servicer context."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc

from millstream_server.runtime.errors import RequestCancelledError, ServingError
from millstream_server.runtime.rpc.layer import Visit
from millstream_server.runtime.rpc.parsing import Malformed

Context = Any
"""grpc.aio.ServicerContext; its generic form exists in the stubs only."""

_EOF = grpc.aio.EOF  # type: ignore[attr-defined]


class GrpcCall:
    """A `Call` on a grpc.aio servicer context."""

    __slots__ = ("_ending", "_metadata", "_task", "context", "failure", "method", "trailers")

    def __init__(self, method: str, context: Context) -> None:
        """Call it in the task that serves the RPC."""
        self.method = method
        self.trailers: tuple[tuple[str, str | bytes], ...] = ()
        self.failure: ServingError | None = None
        """The failure for which `fail` cancelled the handler."""
        self.context = context
        """grpc.aio's context; for this package only."""
        self._metadata: Sequence[tuple[str, str | bytes]] | None = None
        self._task = asyncio.current_task()
        self._ending = False

    @property
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """See `Call`."""
        if self._metadata is None:
            self._metadata = self.context.invocation_metadata() or ()
        return self._metadata

    @property
    def peer(self) -> str:
        """See `Call`."""
        return self.context.peer()  # type: ignore[no-any-return]

    @property
    def certificate_names(self) -> Sequence[str] | None:
        """See `Call`."""
        facts: Mapping[str, Sequence[bytes]] = self.context.auth_context()
        if "x509_pem_cert" not in facts:
            return None
        return [
            name.decode(errors="replace")
            for key in ("peer_uri", "peer_dns")
            for name in facts.get(key, ())
        ]

    @property
    def time_left_s(self) -> float | None:
        """See `Call`."""
        return self.context.time_remaining()  # type: ignore[no-any-return]

    def add_trailer(self, key: str, value: str | bytes) -> None:
        """See `Call`."""
        self.trailers = (*self.trailers, (key, value))

    def cancel(self) -> None:
        """See `Call`."""
        self.fail(RequestCancelledError("the server cancelled this call"))

    def fail(self, failure: ServingError) -> None:
        """Cancel the handler; the RPC ends with the status of ``failure``."""
        if not self._ending and self.failure is None and self._task is not None:
            self.failure = failure
            self._task.cancel()

    def end(self) -> None:
        """Note that the servicer has ended: `fail` then has no effect."""
        self._ending = True

    def was_cancelled(self) -> bool:
        """Return whether the RPC itself was cancelled: by its caller, its deadline or a stop."""
        return self._task is not None and self._task.cancelling() > 0

    def take_failure(self) -> ServingError | None:
        """Return the failure given to `fail`, and undo the cancellation so that it can be sent."""
        if self.failure is not None and self._task is not None:
            self._task.uncancel()
        return self.failure


class Requests(AsyncIterator[Any]):
    """The messages of a call, each read on demand.

    Unlike grpc.aio's iterator it is no generator: one coroutine less per message.
    """

    __slots__ = ("_ended", "_read", "_visits")

    def __init__(self, read: Callable[[], Awaitable[Any]], visits: Sequence[Visit]) -> None:
        """Call `Visit.received` of all ``visits`` with each message."""
        self._read = read
        self._visits = visits
        self._ended = False

    async def __anext__(self) -> Any:
        """Read a message.

        Raises:
            ServingError: it does not parse, or a layer refuses it.
        """
        if self._ended:
            raise StopAsyncIteration
        message = await self._read()
        if message is _EOF:
            self._ended = True
            raise StopAsyncIteration
        if message.__class__ is Malformed:
            raise message.error
        for visit in self._visits:
            visit.received(message)
        return message
