"""Which pages of other sites may call by a browser: CORS, of the Fetch standard.

Without it browsers let only pages of this server's own origin read what it returns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from millstream_server.runtime.rpc.http import Headers
from millstream_server.runtime.transport.headers import Header
from millstream_server.runtime.transport.probes import ProbeResponse

ANY = "*"
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
    origins: Collection[str], verb: str, fields: Sequence[Header]
) -> ProbeResponse | None:
    """Respond to a browser that asks whether a page may send a request; None: this is no question.

    It comes without the page's key.
    """
    wanted = _value(fields, b"access-control-request-method")
    headers = allowed(origins, fields)
    if verb != "OPTIONS" or not wanted or not headers:
        return None
    more = [("access-control-allow-methods", wanted), ("access-control-max-age", str(_MAX_AGE_S))]
    if named := _value(fields, b"access-control-request-headers"):
        more.append(("access-control-allow-headers", named))
    return ProbeResponse(200, b"", (*headers, *more))


def _value(fields: Sequence[Header], name: bytes) -> str:
    return next((value.decode("latin-1") for found, value in fields if found == name), "")
