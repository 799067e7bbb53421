"""Health by HTTP, for probes and load balancers that don't speak gRPC: what a GET is answered.

GET or HEAD of /livez (does the process respond), /readyz and /healthz (does the whole server
serve); with `?service=NAME` the health of that name of grpc.health.v1. 200 is SERVING, 503 is not.

HTTP/2 is served beside RPCs; a connection of HTTP/1.1 has one request, for a probe or to say what
this port is.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

from millstream_server.runtime.rpc.health import LIVENESS, UNKNOWN_NAME, Health
from millstream_server.runtime.rpc.ledger import Place

States = Callable[[], Health]

_NAMES = {"/livez": LIVENESS, "/readyz": "", "/healthz": ""}
PROBE_METHODS = ("GET", "HEAD")
_PORT = (
    "this port serves gRPC, which needs HTTP/2; HTTP probes may GET /livez, /readyz or /healthz, "
    "with ?service=NAME for one service"
)
_PLAIN = "text/plain; charset=utf-8"
_MAX_HEAD_BYTES = 8 << 10
"""Request line and headers: those of probes have some hundred bytes."""
_HEAD_S = 10.0
"""Longest wait for them."""
_LINGER_S = 1.0
"""How long the rest of a request is read and dropped: closing with unread bytes resets the
connection, and a client may lose the response."""


@dataclass(frozen=True, slots=True)
class ProbeResponse:
    """A response of HTTP, in version 1.1 or 2."""

    status: int
    body: bytes
    """Also for HEAD, which gets its length at most."""
    headers: tuple[tuple[str, str], ...]
    """Names are lower case."""


def respond(method: str, target: str, content_type: str, states: States) -> ProbeResponse:
    """Return the response to a request; ``target`` is a path with its query."""
    try:
        url = urlsplit(target)
        query = parse_qs(url.query, max_num_fields=4)
    except ValueError:
        return _sentence(400, "the path can't be read")
    name = _NAMES.get(url.path)
    if name is None:
        # What a gRPC client sends over HTTP/1.1, through a proxy for instance.
        if content_type.startswith("application/grpc"):
            return _sentence(426, _PORT, ("upgrade", "HTTP/2.0"))
        return _sentence(404, _PORT)
    if method not in PROBE_METHODS:
        return _sentence(405, _PORT, ("allow", ", ".join(PROBE_METHODS)))
    return _health(query.get("service", [name])[0], states())


def refusal(status: int, why: str) -> ProbeResponse:
    """Return the response to what isn't a request that can be read."""
    return _sentence(status, f"{why}; {_PORT}")


def _health(name: str, health: Health) -> ProbeResponse:
    serving = health.states.get(name)
    if serving is None:
        return _sentence(404, UNKNOWN_NAME)
    said: dict[str, object] = {"service": name, "status": "SERVING" if serving else "NOT_SERVING"}
    if not serving and health.conditions:
        said["conditions"] = list(health.conditions)
    body = json.dumps(said)
    headers = (("content-type", "application/json"), ("cache-control", "no-store"))
    return ProbeResponse(200 if serving else 503, body.encode() + b"\n", headers)


def _sentence(status: int, text: str, *headers: tuple[str, str]) -> ProbeResponse:
    return ProbeResponse(status, text.encode() + b"\n", (("content-type", _PLAIN), *headers))


class Http1Connection(asyncio.Protocol):
    """Answers one request, then closes."""

    def __init__(self, states: States, place: Place) -> None:
        self._states = states
        self._place = place
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._transport: Any = None
        self._answered = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._end_after(_HEAD_S)

    def data_received(self, data: bytes) -> None:
        """Answer once the headers are there; what follows is dropped."""
        if self._answered:
            return
        if data.startswith(b"PRI * HTTP/2"):
            why = "HTTP/2 over TLS needs the ALPN protocol h2"
            self._send(refusal(400, why), linger=True)
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            why = "the request isn't HTTP/1.1 as it should be"
            self._send(refusal(error.error_status_hint, why), linger=True)
            return
        if isinstance(event, h11.Request):
            self._respond(event)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._place.free()

    def _respond(self, request: h11.Request) -> None:
        method = request.method.decode("ascii")
        headers = {name: value.decode("latin-1") for name, value in request.headers}
        kind = headers.get(b"content-type", "")
        answer = respond(method, request.target.decode("ascii"), kind, self._states)
        try:
            ended = isinstance(self._http.next_event(), h11.EndOfMessage)
        except h11.RemoteProtocolError:  # in the body, which isn't read
            ended = False
        self._send(answer, body=method != "HEAD", linger=not ended)

    def _send(self, answer: ProbeResponse, *, linger: bool, body: bool = True) -> None:
        self._answered = True
        length = ("content-length", str(len(answer.body)))
        # `upgrade` must be named here (RFC 9110, 7.8).
        named = [name for name, _ in answer.headers if name == "upgrade"]
        headers = [*answer.headers, length, ("connection", ", ".join(["close", *named]))]
        parts = [h11.Response(status_code=answer.status, headers=headers)]
        out = b"".join(
            self._http.send(event) or b""
            for event in (*parts, *((h11.Data(answer.body),) if body else ()), h11.EndOfMessage())
        )
        self._transport.write(out)
        if linger:
            if self._transport.can_write_eof():
                self._transport.write_eof()
            self._end_after(_LINGER_S)
        else:
            self._transport.close()

    def _end_after(self, limit_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(limit_s, self._transport.abort)
