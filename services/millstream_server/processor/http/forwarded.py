"""What endpoints share whose requests one worker runs as a whole: vectors, scores, images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Protocol

from millstream_server.processor.conversation import Caller
from millstream_server.processor.slot_streams import trace_of
from millstream_server.runtime.priority import Priority
from millstream_server.runtime.rpc.http import HttpCall
from millstream_server.runtime.telemetry.tracing import ambient


class Asked(Protocol):
    """Fields that all their bodies have."""

    model: str
    priority: Literal["low", "normal", "high"] | None


def common_fields(asked: Asked, call: HttpCall) -> dict[str, Any]:
    """Return what all their requests have."""
    return {
        "model": asked.model,
        "request_id": call.request_id,
        "priority": Priority[(asked.priority or "normal").upper()],
        "trace": trace_of(call, ambient()),
        "deadline_s": Caller.of(call).deadline_s,
    }


class Pieces:
    """A body in pieces, each made when the client has room for it: a `runtime.rpc.call.Source`."""

    gathers = False

    def __init__(self, call: HttpCall, pieces: Iterator[bytes]) -> None:
        """Send ``pieces``, one at least, by ``call``."""
        self._call = call
        self._pieces = pieces
        self._next = next(pieces, None)
        call.ready()

    @property
    def over(self) -> bool:
        return self._next is None

    def next(self) -> bytes | None:
        piece = self._next
        self._next = next(self._pieces, None)
        if self._next is not None:
            self._call.ready()
        return piece
