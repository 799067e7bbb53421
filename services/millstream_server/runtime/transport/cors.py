"""Which pages of other sites may call by a browser, and read what is returned: CORS, of Fetch.

Without it browsers let only pages of this server's own origin read that. But any page can send
simple requests; and with a name of its own that leads to a server on loopback (DNS rebinding) it is
of that origin. `judge` refuses both.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

from millstream_server.runtime.rpc.channel import is_loopback
from millstream_server.runtime.rpc.connect import HttpRefusalError
from millstream_server.runtime.rpc.http import Headers
from millstream_server.runtime.transport.headers import Header
from millstream_server.runtime.transport.options import TransportOptions
from millstream_server.runtime.transport.probes import PROBE_METHODS, PROBES, ProbeResponse

ANY = "*"
_OWN = (b"same-origin", b"none")
"""Sec-Fetch-Site of requests of the server's own page, and of the user's, without any page."""
_PORT = re.compile(r":[0-9]*\Z")
_MAX_AGE_S = 7200
"""How long a browser need not ask again; the longest that Chromium takes."""


def allowed(origins: Collection[str], fields: Sequence[Header]) -> Headers:
    """Make the headers that let the page read that sent a request; none, if it may not."""
    if not origins:
        return ()
    origin = _value(fields, b"origin")
    if not origin or (ANY not in origins and origin not in origins):
        return ()
    said = ANY if ANY in origins else origin
    return (
        ("access-control-allow-origin", said),
        ("access-control-expose-headers", "*"),
        ("vary", "origin"),
    )


def preflight(
    origins: Collection[str], verb: str, target: str, fields: Sequence[Header]
) -> ProbeResponse | None:
    """Respond to a browser that asks whether a page may send a request; None: this is no question.

    It comes without the page's key, as does what asks whether this is a server (RFC 9110, 9.3.7).
    """
    if verb == "OPTIONS" and target == ANY:
        return ProbeResponse(200, b"", (("allow", "GET, HEAD, POST, OPTIONS"),))
    wanted = _value(fields, b"access-control-request-method")
    headers = allowed(origins, fields)
    if verb != "OPTIONS" or not wanted or not headers:
        return None
    more = [("access-control-allow-methods", wanted), ("access-control-max-age", str(_MAX_AGE_S))]
    if named := _value(fields, b"access-control-request-headers"):
        more.append(("access-control-allow-headers", named))
    return ProbeResponse(200, b"", (*headers, *more))


def judge(
    options: TransportOptions, verb: str, path: str, fields: Sequence[Header]
) -> HttpRefusalError | None:
    """Return why a request is refused, for the page that sent it or the host that it is for.

    The content type says nothing: some clients send a form's. Probes and the page are for all.
    """
    if path in PROBES or (path == "/" and verb in PROBE_METHODS):
        return None
    given = dict(fields)
    host = (given.get(b":authority") or given.get(b"host", b"")).decode("latin-1").lower()
    hosts = options.hosts
    if not (hosts is None or not host or _is_local(host) or {ANY, _PORT.sub("", host)} & {*hosts}):
        why = "on a loopback address requests are for localhost, or one of --hosts"
        return HttpRefusalError(403, why)
    site = given.get(b"sec-fetch-site", b"")
    origin = given.get(b"origin", b"").decode("latin-1")
    if site in _OWN or not (site or origin) or {ANY, origin} & {*options.cors_origins}:
        return None
    if host and origin.partition("://")[2] == host:
        return None
    why = "a page of another site sent this; --cors-origins names those that may"
    return HttpRefusalError(403, why)


@functools.lru_cache(16)
def _is_local(host: str) -> bool:
    return is_loopback(_PORT.sub("", host) + ":")


def _value(fields: Sequence[Header], name: bytes) -> str:
    return next((value.decode("latin-1") for found, value in fields if found == name), "")
