"""Prompts that were just sent to members, whose blocks no event has told yet."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

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
        """Forget all prompts of a member."""
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
