"""What a link needs of a connection to its worker, independent of the transport."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message_factory import GetMessageClass
from google.rpc import error_details_pb2, status_pb2

from millstream.v1 import errors_pb2
from millstream_server.protobuf.errors import error_from_proto
from millstream_server.runtime.errors import (
    Code,
    DeadlinePassedError,
    InternalError,
    RequestCancelledError,
    ServingError,
    UnavailableError,
    WorkerLostError,
)
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

Metadata = Sequence[tuple[str, str]]

_UNKNOWN = errors_pb2.ERROR_REASON_UNSPECIFIED
_FAILURES: dict[Code, tuple[type[ServingError], str]] = {
    Code.CANCELLED: (RequestCancelledError, "the request was cancelled"),
    Code.DEADLINE_EXCEEDED: (
        DeadlinePassedError,
        "the deadline passed before the worker had ended the request",
    ),
    Code.RESOURCE_EXHAUSTED: (
        UnavailableError,
        "the worker can't take a request of this size now",
    ),
    Code.UNAVAILABLE: (
        WorkerLostError,
        "the worker that ran this request went away; send it again",
    ),
}
"""Of statuses that the transport itself made."""


class Rpc(NamedTuple):
    """One method of a worker."""

    name: str
    """The full name without a slash before it: ``package.Service/Method``."""
    request: Any
    """The type of its requests."""
    response: Any
    """The type of its responses."""

    @property
    def service(self) -> str:
        return self.name.partition("/")[0]


def rpc_of(file: FileDescriptor, name: str) -> Rpc:
    """Return the method of a file by its name, ``Service/Method``."""
    service, _, method = name.partition("/")
    found = file.services_by_name[service].methods_by_name[method]
    types = (GetMessageClass(kind) for kind in (found.input_type, found.output_type))
    return Rpc(f"{found.containing_service.full_name}/{method}", *types)


class Stream(Protocol):
    """An RPC in progress. One task reads, one writes."""

    async def read(self) -> Any:
        """Wait for the next message; None: the worker has ended the RPC.

        Raises:
            CallError: the RPC failed.
        """

    async def write(self, message: Any) -> None:
        """Send a message; waits while the worker takes none.

        Raises:
            CallError: the RPC has ended.
        """

    async def done_writing(self) -> None:
        """Say that nothing more will be written.

        Raises:
            CallError: the RPC has ended.
        """

    def cancel(self) -> None:
        """End the RPC now; no effect once it has ended."""


class Channel(Protocol):
    """A connection to one worker, used on one event loop. The first RPC connects."""

    @property
    def stale(self) -> bool:
        """Whether the next connection needs a new channel."""

    def stream(self, rpc: Rpc) -> Stream:
        """Start an RPC in both directions."""

    def watch(self, rpc: Rpc, request: Any) -> Stream:
        """Start an RPC with one request and a stream of responses; it is only read."""

    async def call(
        self,
        rpc: Rpc,
        request: Any,
        *,
        timeout_s: float | None = None,
        metadata: Metadata = (),
        wait: bool = False,
    ) -> Any:
        """Return the one response; cancelling this call cancels the RPC.

        ``wait``: until the worker can be reached, ``timeout_s`` at most.

        Raises:
            CallError: the RPC failed.
        """

    async def aclose(self) -> None:
        """End every RPC and disconnect."""


class CallError(Exception):
    """An RPC to a worker ended with another status than OK."""

    def __init__(self, code: Code, message: str = "", status: bytes | None = None) -> None:
        """``status`` is the worker's own, a `google.rpc.Status`; None: the transport made it."""
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.status = status

    def failure(self) -> ServingError:
        """Return what a request fails with: the worker's own failure, or the transport's."""
        if self.status is not None:
            return _of_status(status_pb2.Status.FromString(self.status))
        if self.code in _FAILURES:
            kind, sentence = _FAILURES[self.code]
            return kind(sentence)
        fault = InternalError.with_id()
        log.error("a call to a worker failed", error_id=fault.error_id, error=self)
        return fault


def _of_status(status: status_pb2.Status) -> ServingError:
    info = error_details_pb2.ErrorInfo()
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    found = {
        message.DESCRIPTOR.name
        for message in (info, bad, retry)
        for d in status.details
        if d.Unpack(message)
    }
    name = f"ERROR_REASON_{info.reason}"
    known = errors_pb2.ErrorReason.keys()
    message = errors_pb2.RequestError(
        code=status.code,
        message=status.message,
        reason=errors_pb2.ErrorReason.Value(name) if name in known else _UNKNOWN,
        retryable=info.metadata["retryable"] == "true",
        error_id=info.metadata["error_id"],
        violations=[
            errors_pb2.FieldViolation(field=v.field, description=v.description)
            for v in bad.field_violations
        ],
    )
    if "RetryInfo" in found and retry.retry_delay.ToNanoseconds():
        message.retry_delay.CopyFrom(retry.retry_delay)
    return error_from_proto(message)
