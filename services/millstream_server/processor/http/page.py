"""The page at `/`: a chat and an image maker for browsers, in one file that loads nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

from millstream_server.processor.http.errors import refuse
from millstream_server.runtime.rpc.http import Endpoint, Headers, HttpCall

_HTML = "text/html; charset=utf-8"
_FILE = Path(__file__).with_name("page.html")


class Page:
    """Serves it, to callers without a key, too; one per process."""

    def __init__(self) -> None:
        """Read the file."""
        self._body = _FILE.read_bytes()
        self._headers = _headers(self._body)

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("GET", "/", self.page, refuse)]

    async def page(self, _body: bytes, call: HttpCall) -> None:
        call.respond(_HTML, self._headers)
        await call.write(self._body)


def _headers(page: bytes) -> Headers:
    """Return what allows its own script and style, and requests to this server alone."""
    policy = (
        "default-src 'none'",
        f"script-src {_hash(page, 'script')}",
        f"style-src {_hash(page, 'style')}",
        "img-src data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return (
        ("content-security-policy", "; ".join(policy)),
        ("cache-control", "no-cache"),
        ("referrer-policy", "no-referrer"),
        ("x-content-type-options", "nosniff"),
    )


def _hash(page: bytes, element: str) -> str:
    (content,) = re.findall(rf"<{element}>(.*?)</{element}>".encode(), page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
