"""Uses the client library, and explains its failures in a terminal."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterator

import grpc

from millstream_client import NO_RETRY, Client, MillstreamError, Options
from millstream_client.service_config import ONE_SERVER

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""

# A person waits for a result, also from a suite that isn't ready: no retries and no health checks.
_OPTIONS = Options(service_config=ONE_SERVER, max_reconnect_pause_s=0.5)

_UNKNOWN_METHOD = "UNKNOWN_METHOD"
_NOT_REACHED = ("failed to connect", "connection refused")
_BROKEN = ("socket closed", "connection reset", "broken pipe", "goaway")


def open_client(address: str) -> Client:
    """Make a client that reconnects to a restarted server within half a second.

    Raises:
        ValueError: the address is invalid.
    """
    return Client(address, retry=NO_RETRY, options=_OPTIONS)


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel; with an invalid address its calls fail."""
    try:
        return open_client(address).channel
    except ValueError:
        return grpc.aio.insecure_channel(address)


async def call_processor(address: str, use: Callable[[Client], Awaitable[int]]) -> int:
    """Run ``use`` with a client; return its exit code, or 1 after explaining a failed call."""
    try:
        client = open_client(address)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    async with client:
        try:
            return await use(client)
        except MillstreamError as error:
            print_error(error, address)
            return 1


def print_error(error: MillstreamError, address: str) -> None:
    """Explain a failed call on stderr."""
    print("\n".join(explain(error, address)), file=sys.stderr)


def explain(error: MillstreamError, address: str) -> list[str]:
    """Return a failed call's lines: code, reason, message, invalid fields, whether to retry."""
    if error.reason in ("", _UNKNOWN_METHOD) and (hint := _transport_hint(error, address)):
        return [hint]
    reason = f" ({error.reason})" if error.reason else ""
    lines = [f"error: {error.code.name}{reason}: {error.message}"]
    said = error.message  # a single violation may be all that it says
    lines += [
        f"  field {v.field}: {v.description}"
        for v in error.violations
        if said != f"{v.field}: {v.description}"
    ]
    lines += list(_retry_lines(error.retry_delay_s))
    if error.error_id:
        lines.append(f"  the server's log has more under error id {error.error_id}")
    return lines


def _retry_lines(delay_s: float | None) -> Iterator[str]:
    if delay_s is None:
        return
    yield f"  try again in {delay_s:g} s" if delay_s > 0 else "  trying again may help"


def _transport_hint(error: MillstreamError, address: str) -> str | None:
    """Return an explanation of a failure of the connection, or None."""
    text = error.message.lower()
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"error: the server at {address} has no ProcessorService; "
            "give the Processor's address (workers have other ports)"
        )
    if error.code is not grpc.StatusCode.UNAVAILABLE:
        return None
    if any(sign in text for sign in _BROKEN):
        return f"error: the connection to {address} broke; is the suite still running?"
    if any(sign in text for sign in _NOT_REACHED):
        return f"error: no server at {address}; start one with `millstream up`"
    if "dns resolution failed" in text or "name resolution" in text:
        return f"error: {address} can't be found; give --address as HOST:PORT"
    return None
