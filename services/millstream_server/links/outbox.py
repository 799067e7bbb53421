"""Controls (starts and cancels) that wait to be sent to a worker."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from millstream_server.generation.request import GenerationRequest
from millstream_server.protobuf.generation import write_start

_MAX_BATCH_TOKENS = 1 << 18
"""Most prompt tokens of one message, so that it stays far below a worker's limit of 32 MiB."""


class Outbox(Protocol):
    """Collects controls, added anywhere on the event loop; one writer takes messages."""

    filled: asyncio.Event
    """Set when there may be a message to take; the writer clears it."""

    def start(self, slot: int, request: GenerationRequest) -> None:
        """Add a start; if it can't be converted, raise and add nothing."""
        ...

    def cancel(self, slot: int) -> None:
        """Add a cancel."""
        ...

    def take(self) -> Any:
        """Remove and return the next message, None when there is none."""
        ...


class SingleOutbox:
    """One control per message."""

    def __init__(self, request_type: Any) -> None:
        """Write messages of ``request_type``."""
        self.filled = asyncio.Event()
        self._request_type = request_type
        self._messages: deque[Any] = deque()

    def start(self, slot: int, request: GenerationRequest) -> None:
        """See `Outbox.start`."""
        message = self._request_type()
        write_start(message.start, slot, request)
        self._messages.append(message)
        self.filled.set()

    def cancel(self, slot: int) -> None:
        """See `Outbox.cancel`."""
        message = self._request_type()
        message.cancel.slot = slot
        self._messages.append(message)
        self.filled.set()

    def take(self) -> Any:
        """See `Outbox.take`."""
        return self._messages.popleft() if self._messages else None


class BatchOutbox:
    """All waiting controls in one message: each message takes about 30 µs at each end.

    For workers that accept this (`WorkerDescription.batched_controls`).
    """

    def __init__(self, request_type: Any) -> None:
        """Write messages of ``request_type``."""
        self.filled = asyncio.Event()
        self._request_type = request_type
        self._full: deque[Any] = deque()
        self._open: Any = None
        self._open_tokens = 0

    def start(self, slot: int, request: GenerationRequest) -> None:
        """See `Outbox.start`."""
        controls = self._room_for(len(request.prompt)).controls
        control = controls.add()
        try:
            write_start(control.start, slot, request)
        except BaseException:
            del controls[-1]
            raise
        self.filled.set()

    def cancel(self, slot: int) -> None:
        """See `Outbox.cancel`."""
        self._room_for(0).controls.add().cancel.slot = slot
        self.filled.set()

    def take(self) -> Any:
        """See `Outbox.take`."""
        if self._full:
            return self._full.popleft()
        message, self._open, self._open_tokens = self._open, None, 0
        return message if message is not None and message.controls else None

    def _room_for(self, tokens: int) -> Any:
        if self._open is not None and self._open_tokens + tokens > _MAX_BATCH_TOKENS:
            self._full.append(self._open)
            self._open, self._open_tokens = None, 0
        if self._open is None:
            self._open = self._request_type()
        self._open_tokens += tokens
        return self._open
