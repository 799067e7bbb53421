"""Health by HTTP, for probes and load balancers that don't speak gRPC: what a GET is answered.

GET or HEAD of /livez (does the process respond), /readyz, /healthz and /health (does the whole
server serve); with `?service=NAME` the health of that name of grpc.health.v1. 200 is SERVING, 503
is not.

They need no key, and end a connection of HTTP/1.1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from millstream_server.runtime.rpc.health import LIVENESS, UNKNOWN_NAME, Health

States = Callable[[], Health]

_NAMES = {"/livez": LIVENESS, "/readyz": "", "/healthz": "", "/health": ""}
PROBES = frozenset(_NAMES)
PROBE_METHODS = ("GET", "HEAD")
_PORT = (
    "this port serves gRPC, which needs HTTP/2; HTTP probes may GET /livez, /readyz or /healthz, "
    "with ?service=NAME for one service"
)
_PLAIN = "text/plain; charset=utf-8"


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
