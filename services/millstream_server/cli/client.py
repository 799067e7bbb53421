"""The way to a suite: one channel, and its failures in human lines."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from millstream.v1 import processor_pb2_grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_NOT_REACHED = ("failed to connect", "connection refused")
_BROKEN = ("socket closed", "connection reset", "broken pipe", "goaway")


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a plaintext channel that finds a restarted server within half a second."""
    options: list[tuple[str, int]] = [
        ("grpc.min_reconnect_backoff_ms", 250),
        ("grpc.initial_reconnect_backoff_ms", 250),
        ("grpc.max_reconnect_backoff_ms", 500),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.rpartition(":")[0] in _LOOPBACK:
        # With http_proxy set, gRPC would ask the proxy for this machine's own ports.
        options.append(("grpc.enable_http_proxy", 0))
    return grpc.aio.insecure_channel(address, options=options)


async def call_processor(
    address: str,
    use: Callable[[processor_pb2_grpc.ProcessorServiceStub], Awaitable[int]],
) -> int:
    """Run ``use`` with a stub and answer its exit code; a failed RPC is explained and gives 1."""
    async with open_channel(address) as channel:
        try:
            return await use(processor_pb2_grpc.ProcessorServiceStub(channel))
        except grpc.aio.AioRpcError as error:
            print_error(error, address)
            return 1


def print_error(error: grpc.aio.AioRpcError, address: str) -> None:
    """Explain a failed RPC on stderr."""
    print("\n".join(explain(error, address)), file=sys.stderr)


def explain(error: grpc.aio.AioRpcError, address: str) -> list[str]:
    """Put a failed RPC in lines: code, reason, message, invalid fields, whether to retry."""
    details = _rich_details(error)
    info = details.get(error_details_pb2.ErrorInfo)
    if info is None and (hint := _transport_hint(error, address)):
        return [hint]
    reason = f" ({info.reason})" if info is not None and info.reason else ""
    lines = [f"error: {error.code().name}{reason}: {error.details()}"]
    lines += [
        f"  field {violation.field}: {violation.description}"
        for violation in getattr(details.get(error_details_pb2.BadRequest), "field_violations", ())
    ]
    lines += list(_retry_lines(details.get(error_details_pb2.RetryInfo)))
    if info is not None and "error_id" in info.metadata:
        lines.append(f"  the server's log has more under error id {info.metadata['error_id']}")
    return lines


def _rich_details(error: grpc.aio.AioRpcError) -> dict[type[Any], Any]:
    """Unpack the `google.rpc.Status` in the trailer; empty when there is none that fits."""
    try:
        status = rpc_status.from_call(error)  # type: ignore[arg-type]  # it has the same methods
    except ValueError:
        return {}
    found: dict[type[Any], Any] = {}
    for packed in status.details if status is not None else ():
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
        ):
            message = kind()
            if packed.Unpack(message):
                found[kind] = message
    return found


def _retry_lines(retry: Any | None) -> Iterator[str]:
    if retry is None:
        return
    delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    yield f"  try again in {delay_s:g} s" if delay_s > 0 else "  trying again may help"


def _transport_hint(error: grpc.aio.AioRpcError, address: str) -> str | None:
    """Say what a failure below Millstream means for the person at the terminal."""
    text = (error.details() or "").lower()
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"error: the server at {address} has no ProcessorService; "
            "give the Processor's address (workers answer at other ports)"
        )
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    if any(sign in text for sign in _BROKEN):
        return f"error: the connection to {address} broke; is the suite still running?"
    if any(sign in text for sign in _NOT_REACHED):
        return f"error: nothing answers at {address}; start it with `millstream up`"
    if "dns resolution failed" in text or "name resolution" in text:
        return f"error: {address} can't be found; give --address as HOST:PORT"
    return None
