"""Makes one random connection, and judges what the server sent on it."""

from __future__ import annotations

import contextlib
import json
import ssl
from collections import Counter
from urllib.parse import unquote

import grpc

from tests.benchmarks.fuzzing.frames import WireScript
from tests.benchmarks.fuzzing.scripts import is_callers_fault
from tests.support.wire.raw_http2 import ErrorCode, Frame, Kind, Wire, connected

_LINGER_S = 0.05
"""How long a connection is left to the server when all is sent."""
_FORBIDDEN = {
    str(code.value[0]): code.name
    for code in (
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNAVAILABLE,
    )
}


async def play_wire(
    script: WireScript,
    port: int,
    source: str,
    seen: Counter[str],
    tls: ssl.SSLContext | None = None,
) -> str:
    """Make a connection from an address; return the problem, if there is one.

    ``seen`` counts how streams and connections ended.
    """
    try:
        async with connected(port, tls=tls, first=b"", source=source) as wire:
            wire.decoder.max_allowed_table_size = 1 << 32  # the script may allow the server any
            if not script.reads:
                wire.pause()
            for sent in script.writes:
                wire.send(sent)
                await wire.drained()
            if script.abort:
                wire.abort()
            elif script.reads:
                with contextlib.suppress(AssertionError):
                    await wire.until(lambda: wire.closed, _LINGER_S)
    except OSError as error:
        return f"no connection: {error}"
    seen.update(_ends(wire))
    return _problem(wire)


def _ends(wire: Wire) -> list[str]:
    found = ["connections"]
    for one in wire.frames:
        if one.kind == Kind.GOAWAY:
            found.append(f"GOAWAY {one.error_code.name}")
        elif one.kind == Kind.RST_STREAM:
            found.append(f"RST_STREAM {one.error_code.name}")
        elif status := dict(one.fields).get("grpc-status"):
            found.append(f"status {status}")
        elif (status := dict(one.fields).get(":status", "200")) != "200":
            found.append(f"HTTP {status}")
    return found


def _problem(wire: Wire) -> str:
    if wire.fault is not None:
        return f"the server sent what isn't HTTP/2: {wire.fault!r}"
    for one in wire.frames:
        if found := _problem_of(one) or _problem_of_connect(wire, one):
            return found
    return ""


def _problem_of_connect(wire: Wire, one: Frame) -> str:
    """Judge a failure of HTTP; those of RPCs of Connect say their code."""
    fields = dict(one.fields)
    if not fields.get(":status", "").startswith("5"):
        return ""
    body = b"".join([frame.payload for frame in wire.of(Kind.DATA, one.stream)])
    if not body:
        return ""  # the script's window was too small for it; a bug is in the server's log
    with contextlib.suppress(ValueError):
        said = json.loads(body)
        name = said["code"].upper()
        if name not in _FORBIDDEN.values() or is_callers_fault(name, said["message"]):
            return ""
    return f"HTTP {fields[':status']}: {body[:200]!r}"


def _problem_of(one: Frame) -> str:
    if one.kind in (Kind.GOAWAY, Kind.RST_STREAM):
        return str(one) if one.error_code is ErrorCode.INTERNAL_ERROR else ""
    fields = dict(one.fields)
    text = unquote(fields.get("grpc-message", ""))
    name = _FORBIDDEN.get(fields.get("grpc-status", ""))
    if name and not is_callers_fault(name, text):
        return f"{name}: {text}"
    return ""
