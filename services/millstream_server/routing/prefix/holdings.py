"""The blocks that one member's prefix cache holds, bounded."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from millstream_server.kv_cache.events import Medium

_BITS = {medium: 1 << number for number, medium in enumerate(Medium)}
_DEVICE = _BITS[Medium.DEVICE]


class Holdings:
    """Blocks by hash, each with its parent, in two generations.

    A block that is stored or used is young, and so are its ancestors. `forget` drops the others
    and starts a new generation. So what is dropped was not used for longest, and is never the
    parent of a block that stays: without its ancestors a block helps no prompt.
    """

    __slots__ = ("_media", "_old", "_young")

    def __init__(self) -> None:
        self._young: dict[int, int | None] = {}
        self._old: dict[int, int | None] = {}
        self._media: dict[int, int] = {}
        """Where blocks are, as bits; those that are in `Medium.DEVICE` alone are not in here."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def __contains__(self, block: int) -> bool:
        return block in self._young or block in self._old

    @property
    def young(self) -> int:
        """Number of blocks that were stored or used since the last `forget`."""
        return len(self._young)

    def hashes(self) -> set[int]:
        return self._young.keys() | self._old.keys()

    def blocks(self) -> Iterator[int]:
        """Iterate over all blocks; nothing may change meanwhile."""
        return itertools.chain(self._young, self._old)

    def store(self, hashes: Sequence[int], parent: int | None, medium: Medium) -> None:
        """Add blocks, each the child of the one before; ``parent`` is that of the first."""
        young, old, media = self._young, self._old, self._media
        bit = _BITS[medium]
        self.use(parent)
        for block in hashes:
            if block in young or block in old:
                if block in old:
                    young[block] = old.pop(block)
                where = media.get(block, _DEVICE)
                if not where & bit:
                    media[block] = where | bit
            else:
                young[block] = parent
                if bit != _DEVICE:
                    media[block] = bit
            parent = block

    def remove(self, hashes: Sequence[int], medium: Medium) -> list[int]:
        """Remove blocks from a medium; return those that were held and are in no other one."""
        young, old, media = self._young, self._old, self._media
        bit = _BITS[medium]
        gone = []
        for block in hashes:
            where = media.pop(block, _DEVICE) & ~bit
            if block not in young and block not in old:
                continue
            if not where:
                gone.append(block)
                young.pop(block, None)
                old.pop(block, None)
            elif where != _DEVICE:
                media[block] = where
        return gone

    def use(self, block: int | None) -> None:
        """Make a block and its ancestors young."""
        young, old = self._young, self._old
        while block is not None and block in old:
            parent = young[block] = old.pop(block)
            block = parent

    def forget(self) -> Collection[int]:
        """Drop the blocks that are not young; return them. The young ones are then old."""
        dropped = self._old
        self._old, self._young = self._young, {}
        if self._media:
            for block in dropped:
                self._media.pop(block, None)
        return dropped


EXPECTED_S = 10.0
"""How long a prompt counts. Its events come with the first token; a longer wait is rare, and a
wrong guess costs one prompt that is computed anew."""
_DROPPED_AT_ONCE = 4
"""Most prompts that one call forgets: each call adds one, so they don't pile up."""


class _Prompt(NamedTuple):
    until: float
    member: int
    hashes: Sequence[int]
    known: int
    """How many of its first blocks the member had when it was sent."""


class ExpectedPrompts:
    """Who will soon hold which prompts; members are bits, as in `PrefixIndex`.

    A prompt is found by its first block that its member didn't have. It isn't told when blocks are
    stored or removed: the index knows that, and here the prompt is forgotten soon.
    """

    def __init__(self, max_blocks: int, now: Callable[[], float]) -> None:
        """Start empty; beyond ``max_blocks`` new blocks the earliest prompts are forgotten."""
        self._max_blocks = max_blocks
        self._now = now
        self._prompts: deque[_Prompt] = deque()
        self._by_block: dict[int, list[_Prompt]] = {}
        self._blocks = 0

    def add(self, member: int, hashes: Sequence[int], known: int) -> None:
        """Expect a prompt; ``known`` is below its length."""
        now = self._now()
        prompt = _Prompt(now + EXPECTED_S, member, hashes, known)
        self._prompts.append(prompt)
        self._by_block.setdefault(hashes[known], []).append(prompt)
        self._blocks += len(hashes) - known
        for _ in range(_DROPPED_AT_ONCE):
            if not self._prompts or (
                self._prompts[0].until > now and self._blocks <= self._max_blocks
            ):
                return
            self._drop(self._prompts.popleft())

    def forget(self, member: int) -> None:
        kept: deque[_Prompt] = deque()
        for prompt in self._prompts:
            if prompt.member == member:
                self._drop(prompt)
            else:
                kept.append(prompt)
        self._prompts = kept

    def reach(self, hashes: Sequence[int], held: int) -> dict[int, int]:
        """Return how many of a prompt's first blocks members will hold, by member.

        ``held`` is the most that a member holds now: later blocks can't be a prompt's first new
        one, unless another expected prompt comes before.
        """
        found: dict[int, int] = {}
        by_block = self._by_block
        if not by_block:
            return found
        depth, last = 0, held
        while depth <= last and depth < len(hashes):
            for prompt in by_block.get(hashes[depth], ()):
                blocks = _common(prompt.hashes, hashes, depth)
                if blocks > found.get(prompt.member, 0):
                    found[prompt.member] = blocks
                    last = max(last, blocks)
            depth += 1
        return found

    def _drop(self, prompt: _Prompt) -> None:
        self._blocks -= len(prompt.hashes) - prompt.known
        block = prompt.hashes[prompt.known]
        others = self._by_block[block]
        others.remove(prompt)
        if not others:
            del self._by_block[block]


def _common(one: Sequence[int], other: Sequence[int], start: int) -> int:
    """Return how many blocks two prompts share; a block's hash covers all before it."""
    blocks = range(min(len(one), len(other)))
    return bisect_left(blocks, 1, start, key=lambda block: one[block] != other[block])
