"""What a slot stream has to send: collected from many requests, taken by one writer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from millstream_server.runtime.errors import ServingError, UnavailableError

EntryT = TypeVar("EntryT")
EndT = TypeVar("EndT")

_MESSAGE_BYTES = 1 << 20
"""A message is full when its entries have so many bytes."""
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


@dataclass(frozen=True, slots=True)
class _Item:
    kind: str
    slot: int
    content: Any
    nbytes: int


class SlotOutput(Generic[EntryT, EndT]):
    """Collects entries and ends; `take` returns those of the next message."""

    def __init__(self, stall_limit_s: float) -> None:
        """A request fails whose entry waits while nothing is taken for ``stall_limit_s``."""
        self.wake = asyncio.Event()
        """Set when there is something to take."""
        self._stall_limit_s = stall_limit_s
        self._latest: dict[int, EntryT] = {}
        self._items: deque[_Item] = deque()
        self._bytes = 0
        self._taken = asyncio.Event()
        self._taken_at = time.monotonic()
        self._turn = asyncio.Lock()
        self._draining = False

    @property
    def filled(self) -> bool:
        """Whether there is something to take."""
        return bool(self._items or self._latest or self._draining)

    def latest(self, slot: int, entry: EntryT) -> None:
        """Add an entry; it replaces the slot's last such entry, if that was not taken yet."""
        self._latest[slot] = entry
        self.wake.set()

    async def put(self, slot: int, entry: EntryT, nbytes: int) -> None:
        """Add an entry of ``nbytes``; wait first while too much is waiting to be sent.

        Those who wait go on in the order in which they came.

        Raises:
            UnavailableError: the caller takes nothing.
        """
        began = time.monotonic()
        async with self._turn:
            while self._bytes > _PENDING_BYTES:
                await self._until_taken(began)
        self._add(_Item("entry", slot, entry, nbytes))

    async def _until_taken(self, began: float) -> None:
        """Wait for the next `take`; ``began`` is since when the entry waits."""
        left_s = max(began, self._taken_at) + self._stall_limit_s - time.monotonic()
        self._taken.clear()
        try:
            async with asyncio.timeout(left_s):
                await self._taken.wait()
        except TimeoutError:
            raise UnavailableError(
                f"the caller read nothing for {self._stall_limit_s:g} s; read the stream and "
                "send the request again"
            ) from None

    def finish(self, slot: int, end: EndT) -> None:
        """Add a slot's good end; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add(_Item("finish", slot, end, 64))

    def fail(self, slot: int, error: ServingError) -> None:
        """Add a slot's failure; a latest entry that was not taken is dropped."""
        self._latest.pop(slot, None)
        self._add(_Item("error", slot, error, 256))

    def drain(self) -> None:
        """Say that the server is shutting down."""
        self._draining = True
        self.wake.set()

    async def short(self) -> None:
        """Wait until so little is waiting to be sent that further messages may be read."""
        while len(self._items) > _PENDING_ITEMS:
            self._taken.clear()
            await self._taken.wait()

    def take(self) -> SlotContent[EntryT, EndT]:
        """Remove and return the content of the next message."""
        latest, self._latest = list(self._latest.items()), {}
        found: dict[str, list[Any]] = {"entry": [], "finish": [], "error": []}
        nbytes = 0
        while self._items and nbytes < _MESSAGE_BYTES:
            item = self._items.popleft()
            nbytes += item.nbytes
            found[item.kind].append((item.slot, item.content))
        self._bytes -= nbytes
        self._taken_at = time.monotonic()
        self._taken.set()
        draining, self._draining = self._draining, False
        return SlotContent(latest, found["entry"], found["finish"], found["error"], draining)

    def _add(self, item: _Item) -> None:
        self._items.append(item)
        self._bytes += item.nbytes
        self.wake.set()
