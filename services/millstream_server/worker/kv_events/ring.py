"""The last messages of one rank's log."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent

DEFAULT_BUFFER = 262_144
"""Hashes per rank in the ring: 2 MiB. With blocks of one token an H100 that computes 50,000 prompt
tokens a second stores and removes about 100,000 hashes a second: 2.6 s, longer than a lost stream
takes to reconnect. With blocks of 16 tokens it is 40 s."""
MESSAGE_HASHES = 32_768
"""Most hashes of one message in the ring."""
MAX_EVENTS = 65_536
"""Most events in the ring; about 20 MB with the objects around them."""
_WRITE_BYTES = 256 << 10  # of the 1 MiB that a response may have: 3,000 small events, 10 ms
_EVENT_BYTES = 64  # of an event besides its hashes and its adapter: tags, lengths, parent, medium


@dataclass(frozen=True, slots=True)
class _Message:
    events: tuple[KvEvent, ...]
    hashes: int
    nbytes: int
    """At least its size as protobuf."""


class MessageRing:
    """Keeps the last messages, at most so many hashes and events; numbers them from 1.

    A hash takes 8 bytes here.
    """

    def __init__(self, max_hashes: int) -> None:
        """Start empty."""
        self._max_hashes = max_hashes
        self._messages: deque[_Message] = deque()
        self.hashes = 0
        """Hashes in it."""
        self.events = 0
        """Events in it."""
        self.last = 0
        """Number of the last message; 0: there was none."""

    @property
    def first(self) -> int:
        """Number of the oldest message that is kept; above `last`: none is."""
        return self.last - len(self._messages) + 1

    def add(self, events: Sequence[KvEvent]) -> None:
        """Add events, as one message or several; drop the oldest ones for them."""
        for message in _messages(events):
            self.last += 1
            self._messages.append(message)
            self.hashes += message.hashes
            self.events += len(message.events)
            while self.hashes > self._max_hashes or self.events > MAX_EVENTS:
                dropped = self._messages.popleft()
                self.hashes -= dropped.hashes
                self.events -= len(dropped.events)

    def reaches(self, sequence: int) -> bool:
        """Tell whether all messages after this one are kept."""
        return self.first - 1 <= sequence <= self.last

    def after(self, sequence: int) -> tuple[int, list[KvEvent]]:
        """Return the events after this message that fit into one response, and their last number.

        Only for a number that the ring `reaches`. Without later messages it is that number again.
        """
        kept = self._messages
        events: list[KvEvent] = []
        nbytes = messages = 0
        # By index: a deque finds those near its end at once, where nearly all readers are.
        for index in range(sequence - self.first + 1, len(kept)):
            message = kept[index]
            nbytes += message.nbytes
            if messages and nbytes > _WRITE_BYTES:
                break
            messages += 1
            events += message.events
        return sequence + messages, events


def _messages(events: Sequence[KvEvent]) -> Iterator[_Message]:
    """Cut events into messages of bounded size."""
    held: list[KvEvent] = []
    hashes = nbytes = 0
    for event in itertools.chain.from_iterable(map(_pieces, events)):
        count, size = _size(event)
        if held and nbytes + size > MESSAGE_HASHES * 8 + _EVENT_BYTES:
            yield _Message(tuple(held), hashes, nbytes)
            held, hashes, nbytes = [], 0, 0
        held.append(event)
        hashes += count
        nbytes += size
    if held:
        yield _Message(tuple(held), hashes, nbytes)


def _size(event: KvEvent) -> tuple[int, int]:
    """Return an event's hashes, and its size as protobuf at most."""
    match event:
        case BlocksStored():
            count, adapter_bytes = len(event.hashes), len(event.adapter.encode())
        case BlocksRemoved():
            count, adapter_bytes = len(event.hashes), 0
        case CacheCleared():
            count, adapter_bytes = 0, 0
    return count, 8 * count + adapter_bytes + _EVENT_BYTES


def _pieces(event: KvEvent) -> Iterator[KvEvent]:
    """Cut an event into some of at most `MESSAGE_HASHES`; hashes become compact arrays."""
    if isinstance(event, CacheCleared):
        yield event
        return
    hashes = array("Q", event.hashes)
    for start in range(0, len(hashes), MESSAGE_HASHES):
        piece = hashes[start : start + MESSAGE_HASHES]
        if isinstance(event, BlocksRemoved) or not start:
            yield replace(event, hashes=piece)
        else:
            yield replace(event, hashes=piece, parent=hashes[start - 1])
