"""An image or a video as a client sent it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.media.items import Modality


@dataclass(slots=True, eq=False)
class MediaPart:
    """A part of a message. It keeps its bytes: later turns of the conversation need them again."""

    modality: Modality
    field: str
    """Path of the part in the client's message, for errors."""
    data: bytes = b""
    """The file; empty until ``url`` was fetched, or ``pieces`` were joined."""
    url: str = ""
    pieces: Sequence[bytes] = ()
    """The file as it was uploaded, until it is joined."""
    sha256: bytes = b""
    """Of ``data``; empty until it was checked."""
