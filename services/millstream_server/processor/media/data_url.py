"""Media inside a URL: `data:image/png;base64,...` (RFC 2397)."""

from __future__ import annotations

import base64
import binascii

from millstream_server.runtime.errors import InvalidRequestError

SCHEME = "data"
_MAX_HEADER = 256
"""Characters before the comma."""


def decode_data_url(url: str, field: str, max_bytes: int) -> bytes:
    """Return what a data URL holds; ``field`` is its path. 64 MiB take a tenth of a second.

    Raises:
        InvalidRequestError: it isn't base64, or has more than ``max_bytes``.
    """
    comma = url.find(",", 0, _MAX_HEADER)
    if comma < 0 or not url[:comma].lower().endswith(";base64"):
        raise InvalidRequestError.of(
            field, "is a data URL without base64; write data:image/png;base64,..."
        )
    digits = len(url) - comma - 1 - url[-2:].count("=")
    nbytes = digits * 3 // 4
    if nbytes > max_bytes:
        raise InvalidRequestError.of(field, f"has {nbytes} bytes; {max_bytes} are allowed")
    if nbytes == 0:
        raise InvalidRequestError.of(field, "is a data URL without data")
    try:
        # Padding is optional in many clients' libraries.
        return base64.b64decode(
            url[comma + 1 :] + "=" * (-(len(url) - comma - 1) % 4), validate=True
        )
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError.of(field, "is a data URL whose base64 isn't valid") from error
