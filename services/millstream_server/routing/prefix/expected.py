"""Blocks that prompts leave where they were just sent, before the events tell so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

EXPECTED_S = 10.0
"""How long an expected block counts. Its event comes with the first token; a longer wait is rare,
and a wrong guess costs one prompt that is computed anew."""
_DROPPED_AT_ONCE = 4
"""Most prompts that one call forgets: each call adds one, so they don't pile up."""


class ExpectedBlocks:
    """Which members will probably hold which blocks; members are bits, as in `PrefixIndex`.

    It isn't told when a block is stored or removed: both are known to the index, and here it is
    forgotten soon.
    """

    def __init__(self, max_blocks: int, now: Callable[[], float]) -> None:
        """Start empty; beyond ``max_blocks`` the earliest prompts are forgotten early."""
        self.members: dict[int, int] = {}
        """Block to members."""
        self._max_blocks = max_blocks
        self._now = now
        self._prompts: deque[tuple[float, int, Sequence[int]]] = deque()
        """Until when which member's blocks count."""
        self._blocks = 0

    def add(self, member: int, hashes: Sequence[int]) -> None:
        """Expect blocks."""
        now = self._now()
        members = self.members
        for block in hashes:
            members[block] = members.get(block, 0) | member
        self._prompts.append((now + EXPECTED_S, member, hashes))
        self._blocks += len(hashes)
        for _ in range(_DROPPED_AT_ONCE):
            if self._prompts[0][0] > now and self._blocks <= self._max_blocks:
                break
            _, earlier, blocks = self._prompts.popleft()
            self._drop(earlier, blocks)
            if not self._prompts:
                break

    def forget(self, member: int) -> None:
        """Forget all blocks of a member."""
        for _, _, hashes in [prompt for prompt in self._prompts if prompt[1] == member]:
            self._drop(member, hashes)
        self._prompts = deque(prompt for prompt in self._prompts if prompt[1] != member)

    def _drop(self, member: int, hashes: Sequence[int]) -> None:
        self._blocks -= len(hashes)
        members = self.members
        for block in hashes:
            left = members.pop(block, 0) & ~member
            if left:
                members[block] = left
