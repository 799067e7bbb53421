"""What a slot stream has to send: collected from many requests, taken by one writer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from millstream_server.runtime.errors import ServingError, UnavailableError
from millstream_server.runtime.rpc.slots import Outgoing


class Response(Protocol):
    """What is read of a message that is sent."""

    def ByteSize(self) -> int:  # noqa: N802 - protobuf's name
        """Return its size on the wire."""
        ...


EntryT = TypeVar("EntryT")
EndT = TypeVar("EndT")
ResponseT = TypeVar("ResponseT", bound=Response)

_MESSAGE_BYTES = 1 << 20
"""A message is full when its entries have so many bytes."""
_MAX_MESSAGE_BYTES = 3 << 20
"""gRPC's callers take 4 MiB unless they say otherwise; one entry has little more than 1 MiB."""
_PENDING_BYTES = 2 << 20
"""While more is waiting to be sent, requests with further entries wait."""
_PENDING_ITEMS = 4096
"""While more entries are waiting to be sent, no further message of the caller is read."""


@dataclass(frozen=True, slots=True)
class SlotContent(Generic[EntryT, EndT]):
    """What one message has, per slot, in order; `latest` and `entries` come before the ends."""

    latest: Sequence[tuple[int, EntryT]]
    """Entries of which only the newest of a slot is of interest."""
    entries: Sequence[tuple[int, EntryT]]
    finished: Sequence[tuple[int, EndT]]
    errors: Sequence[tuple[int, ServingError]]
    draining: bool

    def halves(self) -> tuple[SlotContent[EntryT, EndT], SlotContent[EntryT, EndT]] | None:
        """Return two parts, to be sent in this order; None: there is only one thing in it."""
        parts: list[Sequence[Any]] = [self.latest, self.entries, self.finished, self.errors]
        room = sum(map(len, parts)) // 2
        if not room:
            return None
        first, second = [], []
        for part in parts:
            first.append(part[:room])
            second.append(part[room:])
            room = max(0, room - len(part))
        return (
            SlotContent(first[0], first[1], first[2], first[3], self.draining),
            SlotContent(second[0], second[1], second[2], second[3], draining=False),
        )


class SlotOutput(Outgoing[ResponseT], Generic[EntryT, EndT, ResponseT]):
    """Collects entries and ends."""

    def __init__(
        self, response: Callable[[SlotContent[EntryT, EndT]], ResponseT], stall_limit_s: float
    ) -> None:
        """Make messages by ``response``.

        A request fails whose entry waits while nothing is taken for ``stall_limit_s``.
        """
        super().__init__()
        self._response = response
        self._stall_limit_s = stall_limit_s
        self._latest: dict[int, EntryT] = {}
        self._items: deque[tuple[str, int, Any, int]] = deque()
        """Kind, slot, content and bytes of each."""
        self._bytes = 0
        self._taken_at = time.monotonic()
        self._turn = asyncio.Lock()

    @property
    def crowded(self) -> bool:
        """See `Outgoing.crowded`."""
        return len(self._items) > _PENDING_ITEMS

    def latest(self, slot: int, entry: EntryT) -> None:
        """Add an entry; it replaces the slot's last such entry, if that was not taken yet."""
        self._latest[slot] = entry
        self._fill()

    async def put(self, slot: int, entry: EntryT, nbytes: int) -> None:
        """Add an entry of ``nbytes``; wait first while too much is waiting to be sent.

        Those who wait go on in the order in which they came.

        Raises:
            UnavailableError: the caller takes nothing.
        """
        began = time.monotonic()
        async with self._turn:
            while self._bytes > _PENDING_BYTES:
                left_s = max(began, self._taken_at) + self._stall_limit_s - time.monotonic()
                try:
                    async with asyncio.timeout(left_s):
                        await self.taken()
                except TimeoutError:
                    raise UnavailableError(
                        f"the caller read nothing for {self._stall_limit_s:g} s; read the stream "
                        "and send the request again"
                    ) from None
        self._add("entry", slot, entry, nbytes)

    def finish(self, slot: int, end: EndT) -> None:
        """Add a slot's good end; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add("finish", slot, end, 64)

    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add("error", slot, error, 256)

    def take(self) -> Iterator[ResponseT]:
        """Make the next message, or several: one that is too large would end the caller's stream.

        Only the message itself tells its size; that of errors and previews isn't known before.
        """
        latest, self._latest = list(self._latest.items()), {}
        found: dict[str, list[Any]] = {"entry": [], "finish": [], "error": []}
        nbytes = 0
        while self._items and nbytes < _MESSAGE_BYTES:
            kind, slot, content, size = self._items.popleft()
            nbytes += size
            found[kind].append((slot, content))
        self._bytes -= nbytes
        self._taken_at = time.monotonic()
        content = SlotContent(
            latest, found["entry"], found["finish"], found["error"], self._draining
        )
        self._empty(rest=bool(self._items))
        return self._messages(content)

    def _messages(self, content: SlotContent[EntryT, EndT]) -> Iterator[ResponseT]:
        response = self._response(content)
        if response.ByteSize() <= _MAX_MESSAGE_BYTES or (halves := content.halves()) is None:
            yield response
            return
        for half in halves:
            yield from self._messages(half)

    def _add(self, kind: str, slot: int, content: Any, nbytes: int) -> None:
        self._items.append((kind, slot, content, nbytes))
        self._bytes += nbytes
        self._fill()
