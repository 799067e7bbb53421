"""Builds a stream's next EncodeResponse."""

from __future__ import annotations

import asyncio

from millstream.v1 import encode_pb2
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.protobuf.media import ref_to_proto
from millstream_server.runtime.errors import ServingError
from millstream_server.worker.encoding.core import LeasedItem


class ResponseBuilder:
    """Collects what slots report; `take` returns it and starts the next response.

    Everything reported in one iteration of the event loop, or while a write is in progress, is in
    one response.
    """

    def __init__(self) -> None:
        """Start without content."""
        self.wake = asyncio.Event()
        """Set when the response has content."""
        self._begin()

    def _begin(self) -> None:
        self.filled = False
        """Whether the response has content."""
        self._draining = False
        self._wanted: list[int] = []
        self._encoded: list[tuple[int, LeasedItem]] = []
        self._errors: list[tuple[int, ServingError]] = []

    def _fill(self) -> None:
        self.filled = True
        self.wake.set()

    def want(self, slot: int) -> None:
        """Ask for a slot's bytes."""
        self._fill()
        self._wanted.append(slot)

    def finish(self, slot: int, encoded: LeasedItem) -> None:
        """Add a slot's result."""
        self._fill()
        self._encoded.append((slot, encoded))

    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure."""
        self._fill()
        self._errors.append((slot, error))

    def drain(self) -> None:
        """Say that the worker is shutting down."""
        self._fill()
        self._draining = True

    def take(self) -> encode_pb2.EncodeResponse:
        """Return the response, and start the next one."""
        response = encode_pb2.EncodeResponse(
            encoded=[
                encode_pb2.EncodedItem(
                    slot=slot, ref=ref_to_proto(encoded.item, encoded.lease.left_s)
                )
                for slot, encoded in self._encoded
            ],
            errors=[
                encode_pb2.EncodeError(slot=slot, error=error_to_proto(error))
                for slot, error in self._errors
            ],
            # Not those of slots that have ended since.
            wanted=[slot for slot in self._wanted if slot not in self._ended()],
            draining=self._draining,
        )
        self._begin()
        return response

    def _ended(self) -> set[int]:
        return {slot for slot, _ in (*self._encoded, *self._errors)}
