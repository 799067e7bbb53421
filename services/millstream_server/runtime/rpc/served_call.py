"""An RPC while it is served: the `Call` of servicers and layers, and what `serving` needs.

Also requests that don't parse, mostly for a `string` that isn't UTF-8: the error names the field.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Self, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    Code,
    Failure,
    MalformedMessageError,
    RequestCancelledError,
    StatusError,
    UnavailableError,
)
from millstream_server.runtime.rpc.call import Call, Source, Visit

_LENGTH_DELIMITED = 2
_MAX_DEPTH = 16
_MAX_EXPLAINED_BYTES = 64 << 10
"""Longer messages aren't searched for the bad field, which would block the event loop."""
Trailers = tuple[tuple[str, str | bytes], ...]


class CallOverError(Exception):
    """The RPC has ended; nothing can be sent on it any more."""


class ServedCall(Call, ABC):
    """A `Call` on some transport. All calls come from the task that serves it, or from its loop.

    A transport adds how messages and statuses are read and sent, and the rest of `Call`.
    """

    __slots__ = ("_all_came", "_task", "caller_key", "ending", "failure", "method", "trailers",
                 "visits")  # fmt: skip

    method: str
    END: ClassVar[Any]
    """What `read` returns when the caller has closed its side."""

    read: Callable[[], Awaitable[Any]]
    """Returns the next request, parsed; `END` after the last one."""
    write: Callable[[Any], Awaitable[None]]
    """Sends a response; waits until the transport has taken it."""
    ready: Callable[[], None]
    """See `Call`; this and the next only where clients are served: no worker's method uses it."""
    send_from: Callable[[Source], Awaitable[None]]

    def __init__(self, method: str) -> None:
        self.method = method
        self.trailers: Trailers = ()
        self._all_came = False
        self.visits: list[Visit] = []
        """Of the layers that were entered."""
        self.failure: Failure | None = None
        """The failure for which `fail` cancelled the handler; of a new call, that it is to end with
        behind the layers, so that authentication comes first."""
        self._task: asyncio.Task[Any] | None = None
        """The task that serves it; set by the transport."""
        self.ending = False
        """The servicer has ended, or the RPC has without it: `fail` then has no effect."""

    # ---- what servicers and layers use; see `Call` -----------------------------------------------

    @property
    def all_read(self) -> bool:
        return False

    def add_trailer(self, key: str, value: str | bytes) -> None:
        self.trailers = (*self.trailers, (key, value))

    def cancel(self) -> None:
        self.fail(RequestCancelledError("the server cancelled this call"))

    # ---- its requests: no generator, which is one coroutine more per message --------------------

    def __aiter__(self) -> Self:
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
        if isinstance(message, StatusError):
            raise message
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
    async def abort(self, failure: Failure) -> None:
        """End with the status of a failure, and the trailers.

        Raises:
            CallOverError: the RPC has ended already.
        """

    def is_late(self, error: BaseException) -> bool:
        """Return whether an error of `read` or `write` means that the RPC has ended."""
        return isinstance(error, CallOverError)

    def fail(self, failure: Failure) -> None:
        """Cancel the handler; the RPC ends with the status of ``failure``."""
        if not self.ending and self.failure is None and self._task is not None:
            self.failure = failure
            self._task.cancel()

    def was_cancelled(self) -> bool:
        """Return whether the RPC itself was cancelled: by its caller, its deadline or a stop."""
        return self._task is not None and self._task.cancelling() > 0

    def take_failure(self) -> Failure | None:
        """Return the failure given to `fail`, and undo the cancellation so that it can be sent."""
        if self.failure is not None and self._task is not None:
            self._task.uncancel()
        return self.failure


class OpenCalls(OpenWork):
    """A server's RPCs whose handlers run. All calls come from one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: set[ServedCall] = set()

    def add(self, call: ServedCall) -> None:
        self.begin()
        self._calls.add(call)

    def remove(self, call: ServedCall) -> None:
        self._calls.discard(call)
        self.end()

    def cut(self) -> None:
        """End open RPCs with our status: if gRPC cut them, the status would have no details."""
        for call in tuple(self._calls):
            call.fail(
                UnavailableError("this server had to shut down before this was done; send it again")
            )


# ---- requests that don't parse -------------------------------------------------------------------


def tolerant(
    deserialize: Callable[[bytes], Any] | None, max_bytes: int | None = None
) -> Callable[[bytes], Any]:
    """Wrap a generated deserializer: it returns the error of a message that it can't take.

    That is one that doesn't parse, or has more than ``max_bytes``. Without a deserializer requests
    stay bytes, as in gRPC.
    """
    if deserialize is None:
        return bytes
    descriptor = getattr(getattr(deserialize, "__self__", None), "DESCRIPTOR", None)

    def parse(data: bytes) -> Any:
        if max_bytes is not None and len(data) > max_bytes:
            return _too_large(len(data), max_bytes)
        try:
            return deserialize(data)
        except DecodeError:
            return _explain(descriptor, data)

    return parse


def _too_large(nbytes: int, most: int) -> StatusError:
    """Make the failure that gRPC's own limits have."""
    return StatusError(
        Code.RESOURCE_EXHAUSTED,
        f"the message has {nbytes} bytes; this method takes {most} at most",
    )


def _explain(descriptor: Descriptor | None, data: bytes) -> MalformedMessageError:
    short = len(data) <= _MAX_EXPLAINED_BYTES
    path = _find_bad_text(descriptor, data, "", 0) if descriptor and short else None
    if path:
        return MalformedMessageError(f"{path}: is not valid UTF-8")
    name = descriptor.full_name if descriptor else "the method's request message"
    return MalformedMessageError(f"the message is not a valid {name}; check the client's stubs")


def _find_bad_text(descriptor: Descriptor, data: bytes, prefix: str, depth: int) -> str | None:
    """Walk the wire format with its descriptor; return the path of the first bad string."""
    try:
        fields = UnknownFieldSet(Empty.FromString(data))
    except DecodeError:
        return None
    seen: Counter[int] = Counter()
    for raw in cast("Iterable[Any]", fields):
        field = descriptor.fields_by_number.get(raw.field_number)
        index = seen[raw.field_number]
        seen[raw.field_number] += 1
        if field is None or raw.wire_type != _LENGTH_DELIMITED or not isinstance(raw.data, bytes):
            continue
        path = prefix + field.name + (f"[{index}]" if field.is_repeated else "")
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(raw.data):
            return path
        if field.message_type is not None and depth < _MAX_DEPTH:
            found = _find_bad_text(field.message_type, raw.data, path + ".", depth + 1)
            if found:
                return found
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
