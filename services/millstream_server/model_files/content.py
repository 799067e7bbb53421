"""Whether a file has the content that its source tells of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millstream_server.model_files.listing import RemoteFile

_BLOCK = 2**20


def content_differs(file: RemoteFile, path: Path) -> str | None:
    """Compare a file with the hash that its source tells; return what differs, in words."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes instead of {file.size}"
    if file.sha256:
        found, name, expected = hashlib.sha256(), "SHA-256", file.sha256
    elif file.git_sha1:
        found, name, expected = hashlib.sha1(usedforsecurity=False), "blob id", file.git_sha1
        found.update(b"blob %d\0" % size)
    else:
        return None
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            found.update(block)
    digest = found.hexdigest()
    return None if digest == expected else f"its {name} is {digest} instead of {expected}"
