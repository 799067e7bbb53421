"""An RPC while it is served: the `Call` of servicers and layers, and what `serving` needs."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar, Self

from millstream_server.runtime.errors import (
    Code,
    Failure,
    RequestCancelledError,
)
from millstream_server.runtime.rpc.call import Source
from millstream_server.runtime.rpc.caller_key import key_of_address
from millstream_server.runtime.rpc.layer import Visit
from millstream_server.runtime.rpc.parsing import Malformed
from millstream_server.runtime.security.certificate_names import CertificateName

Trailers = tuple[tuple[str, str | bytes], ...]


class CallOverError(Exception):
    """The RPC has ended; nothing can be sent on it any more."""


class ServedCall(ABC):
    """A `Call` on some transport. All calls come from the task that serves it, or from its loop.

    A transport adds how messages and statuses are read and sent, and the rest of `Call`.
    """

    __slots__ = (
        "_all_came",
        "_caller_key",
        "_task",
        "ending",
        "failure",
        "method",
        "trailers",
        "visits",
    )

    END: ClassVar[Any]
    """What `read` returns when the caller has closed its side."""

    read: Callable[[], Awaitable[Any]]
    """Returns the next request, parsed; `END` after the last one."""
    write: Callable[[Any], Awaitable[None]]
    """Sends a response; waits until the transport has taken it."""
    ready: Callable[[], None]
    """See `Call`; only where there is `send_from`."""

    def __init__(self, method: str) -> None:
        """Make a call of ``method``, its full name."""
        self.method = method
        self.trailers: Trailers = ()
        self._all_came = False
        self.visits: list[Visit] = []
        """Of the layers that were entered."""
        self.failure: Failure | None = None
        """The failure for which `fail` cancelled the handler."""
        self._task: asyncio.Task[Any] | None = None
        """The task that serves it; set by the transport."""
        self.ending = False
        """`end` was called: the servicer has ended, or the RPC has without it."""
        self._caller_key: str | None = None

    # ---- what servicers and layers use; see `Call` -----------------------------------------------

    @property
    @abstractmethod
    def metadata(self) -> Sequence[tuple[str, str | bytes]]:
        """See `Call`."""

    @property
    @abstractmethod
    def peer(self) -> str:
        """See `Call`."""

    @property
    def caller_key(self) -> str:
        """See `Call`."""
        if self._caller_key is None:
            self._caller_key = key_of_address(self.peer)
        return self._caller_key

    @caller_key.setter
    def caller_key(self, key: str) -> None:
        self._caller_key = key

    @property
    @abstractmethod
    def certificate_names(self) -> Sequence[CertificateName] | None:
        """See `Call`."""

    @property
    @abstractmethod
    def time_left_s(self) -> float | None:
        """See `Call`."""

    @property
    def all_read(self) -> bool:
        """See `Call`."""
        return False

    def add_trailer(self, key: str, value: str | bytes) -> None:
        """See `Call`."""
        self.trailers = (*self.trailers, (key, value))

    def cancel(self) -> None:
        """See `Call`."""
        self.fail(RequestCancelledError("the server cancelled this call"))

    async def send_from(self, source: Source) -> None:
        """See `Call`; workers' servers have no method that uses it."""
        raise NotImplementedError

    # ---- its requests: no generator, which is one coroutine more per message --------------------

    def __aiter__(self) -> Self:
        """Iterate over the requests."""
        return self

    async def __anext__(self) -> Any:
        """Read a request.

        Raises:
            ServingError: it does not parse, or a layer refuses it.
        """
        if self._all_came:
            raise StopAsyncIteration
        message = await self.read()
        if message is self.END:
            self._all_came = True
            raise StopAsyncIteration
        if message.__class__ is Malformed:
            raise message.error
        for visit in self.visits:
            visit.received(message)
        return message

    # ---- for `serving` ---------------------------------------------------------------------------

    @property
    def has_request(self) -> bool:
        """Whether `read` returns at once; False where the transport can't tell."""
        return False

    @abstractmethod
    def complete(self) -> None:
        """End with OK and the trailers, after the last response."""

    @abstractmethod
    async def abort(self, code: Code, message: str, trailers: Trailers) -> None:
        """End with another status.

        Raises:
            CallOverError: the RPC has ended already.
        """

    @abstractmethod
    def is_late(self, error: BaseException) -> bool:
        """Return whether an error of `read` or `write` means that the RPC has ended."""

    def fail(self, failure: Failure) -> None:
        """Cancel the handler; the RPC ends with the status of ``failure``."""
        if not self.ending and self.failure is None and self._task is not None:
            self.failure = failure
            self._task.cancel()

    def end(self) -> None:
        """Note that the servicer has ended: `fail` then has no effect."""
        self.ending = True

    def was_cancelled(self) -> bool:
        """Return whether the RPC itself was cancelled: by its caller, its deadline or a stop."""
        return self._task is not None and self._task.cancelling() > 0

    def take_failure(self) -> Failure | None:
        """Return the failure given to `fail`, and undo the cancellation so that it can be sent."""
        if self.failure is not None and self._task is not None:
            self._task.uncancel()
        return self.failure
