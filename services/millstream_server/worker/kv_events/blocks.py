"""What one rank's prefix cache holds now, and the last changes of it.

The blocks can be read as they were at one moment while they go on changing (`FreezableDict`).
"""

from __future__ import annotations

import functools
import itertools
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Generic, TypeVar

from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)

V = TypeVar("V")
D = TypeVar("D")


class _Gone:
    """Marks a key that was removed since the dict was frozen."""


_GONE: Final = _Gone()


class FreezableDict(Generic[V]):
    """Maps block hashes to values.

    While it is frozen, changes are kept apart, one entry per changed key; nothing is copied when it
    is frozen, and `thaw` takes 0.2 µs per changed key. Keys keep the order in which they
    were added first.
    """

    def __init__(self) -> None:
        self._base: dict[int, V] = {}
        self._changes: dict[int, V | _Gone] | None = None
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def get(self, key: int, default: D) -> V | D:
        if self._changes and key in self._changes:
            value = self._changes[key]
            return default if isinstance(value, _Gone) else value
        return self._base.get(key, default)

    def set(self, key: int, value: V) -> None:
        if self._changes is None:
            self._base[key] = value
            self._size = len(self._base)
            return
        if key not in self:
            self._size += 1
        self._changes[key] = value

    def discard(self, key: int) -> None:
        if self._changes is None:
            self._base.pop(key, None)
            self._size = len(self._base)
        elif key in self:
            self._size -= 1
            if key in self._base:
                self._changes[key] = _GONE
            else:
                del self._changes[key]

    def __contains__(self, key: int) -> bool:
        if self._changes and key in self._changes:
            return self._changes[key] is not _GONE
        return key in self._base

    def clear(self) -> None:
        """Remove everything; afterwards it isn't frozen. What was frozen stays as it is."""
        self._base, self._changes, self._size = {}, None, 0

    def freeze(self) -> Mapping[int, V]:
        """Return the content of the moment when it was frozen; it stays as it is until `thaw`.

        If it is frozen already, this is the content of that earlier moment.
        """
        if self._changes is None:
            self._changes = {}
        return self._base

    def thaw(self) -> None:
        """Take over the changes; what `freeze` returned must not be read any more."""
        changes, self._changes = self._changes, None
        for key, value in (changes or {}).items():
            if isinstance(value, _Gone):
                self._base.pop(key, None)
            else:
                self._base[key] = value


_BITS = {medium: 1 << position for position, medium in enumerate(Medium)}

Kind = tuple[int, str]
"""A set of media, as bits, and an adapter."""
_PLAIN: Kind = (_BITS[Medium.DEVICE], "")


@functools.lru_cache(1024)
def _kind(media: int, adapter: str) -> Kind:
    """Return one and the same tuple for equal values, so that a block costs a reference."""
    return (media, adapter)


def _chains(
    parents: Mapping[int, int | None], kinds: Mapping[int, Kind], max_hashes: int
) -> Iterator[BlocksStored]:
    chain: list[int] = []
    before: int | None = None
    last, kind = None, _PLAIN
    for block, parent in parents.items():
        its_kind = kinds.get(block, _PLAIN) if kinds else _PLAIN
        if chain and parent == last and its_kind == kind and len(chain) < max_hashes:
            chain.append(block)
        else:
            yield from _stored(chain, before, kind)
            chain, before, kind = [block], parent, its_kind
        last = block
    yield from _stored(chain, before, kind)


def _stored(chain: list[int], parent: int | None, kind: Kind) -> Iterator[BlocksStored]:
    if chain:
        bits, adapter = kind
        for medium in Medium:
            if bits & _BITS[medium]:
                yield BlocksStored(chain, parent, medium, adapter)


class CachedBlocks:
    """A set of blocks: each one's parent, media and adapter.

    A block costs 80 to 110 bytes (its hash and an entry in a dict, measured with a million of them;
    the parent is the number object that the parent's own entry has); one of an adapter, or not on
    the device alone, 60 more. Blocks that are stored twice or removed without being there change
    nothing.
    """

    def __init__(self) -> None:
        self._parents: FreezableDict[int | None] = FreezableDict()
        self._kinds: FreezableDict[Kind] = FreezableDict()  # of blocks that aren't _PLAIN

    def __len__(self) -> int:
        """Return the number of blocks; one in several media counts once."""
        return len(self._parents)

    def apply(self, event: KvEvent) -> None:
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case CacheCleared():
                self._parents.clear()
                self._kinds.clear()

    def freeze(self, max_hashes: int) -> Iterator[BlocksStored]:
        """Return all blocks of now, or of the moment when it was frozen; valid until `thaw`.

        They come as chains of at most ``max_hashes``, once for each medium; a block comes after its
        parent if it was cached after it. Nothing is copied. Until `thaw` each block that changes
        costs an entry more.
        """
        return _chains(self._parents.freeze(), self._kinds.freeze(), max_hashes)

    def thaw(self) -> None:
        self._parents.thaw()
        self._kinds.thaw()

    def _store(self, event: BlocksStored) -> None:
        parents, kinds = self._parents, self._kinds
        bit, adapter, parent = _BITS[event.medium], event.adapter, event.parent
        new = _kind(bit, adapter)
        for block in event.hashes:
            if block not in parents:
                parents.set(block, parent)
                if new != _PLAIN:
                    kinds.set(block, new)
            elif not (known := kinds.get(block, _PLAIN))[0] & bit:
                kinds.set(block, _kind(known[0] | bit, known[1]))
            parent = block

    def _remove(self, event: BlocksRemoved) -> None:
        parents, kinds = self._parents, self._kinds
        bit = _BITS[event.medium]
        for block in event.hashes:
            known = kinds.get(block, _PLAIN)
            if block not in parents or not known[0] & bit:
                continue
            left = _kind(known[0] & ~bit, known[1])
            if not left[0]:
                parents.discard(block)
                kinds.discard(block)
            elif left == _PLAIN:
                kinds.discard(block)
            else:
                kinds.set(block, left)


# ---- the last messages ---------------------------------------------------------------------------

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
        self._max_hashes = max_hashes
        self._messages: deque[_Message] = deque()
        self.hashes = 0
        self.events = 0
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
