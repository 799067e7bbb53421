"""Which members hold which KV blocks: one model's prefix caches, as their events tell them.

A member is one prefix cache: a worker, or one of its data-parallel ranks. It has a small number,
and sets of members are ints with one bit per member. Blocks of one chain that have the same members
share one int object, so that a prompt's prefix, which a thousand members may hold, is looked up
with one comparison of pointers per block.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, KvEvent
from millstream_server.routing.prefix.expected import ExpectedPrompts
from millstream_server.routing.prefix.holdings import Holdings

DEFAULT_MAX_BLOCKS = 2_000_000
"""About 240 MB, when full: the caches of 64 workers with 500,000 tokens each, in blocks of 16."""


class Overlap(NamedTuple):
    """Members that hold a prompt's first blocks, and not the next one."""

    blocks: int
    """How many; at least one."""
    members: int
    """The members, as bits."""


class _Member:
    """One member's blocks."""

    __slots__ = ("bit", "held")

    def __init__(self, number: int) -> None:
        self.bit = 1 << number
        self.held = Holdings()


class PrefixIndex:
    """Bounded: each member may have an equal share of ``max_blocks``.

    Beyond its share, the blocks of a member that were not stored or used for longest are forgotten,
    leaves first (`Holdings`). Requests then go where less is known to be cached; nothing else
    changes. Not thread-safe.
    """

    def __init__(
        self,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without members; ``now`` is in seconds."""
        self.blocks = 0
        """Number of blocks that members hold, each counted once per member: what is bounded."""
        self.max_blocks = max_blocks
        """Most blocks that are kept, of all members."""
        self._holders: dict[int, int] = {}
        """Block to members."""
        self._members: dict[int, _Member] = {}
        self._free: list[int] = []
        """Numbers of members that left, as a heap: small numbers make small ints."""
        self._expected = ExpectedPrompts(max_blocks // 4, now)

    # ---- members ---------------------------------------------------------------------------------

    def join(self) -> int:
        """Add a member without blocks; return its number."""
        number = heapq.heappop(self._free) if self._free else len(self._members)
        self._members[number] = _Member(number)
        return number

    def leave(self, member: int) -> None:
        """Remove a member and its blocks; its number may be given to another."""
        self._clear(self._members.pop(member))
        heapq.heappush(self._free, member)

    def held(self, member: int) -> set[int]:
        """Return a member's blocks; expected ones don't count."""
        return self._members[member].held.hashes()

    # ---- changes ---------------------------------------------------------------------------------

    def apply(self, member: int, events: Iterable[KvEvent]) -> None:
        """Apply changes of a member's cache, in order."""
        one = self._members[member]
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(one, event)
            elif isinstance(event, BlocksRemoved):
                self._drop(one, one.held.remove(event.hashes, event.medium))
            else:
                self._clear(one)

    def replace(self, member: int, stored: Iterable[BlocksStored]) -> None:
        """Replace all of a member's blocks."""
        one = self._members[member]
        self._clear(one)
        for event in stored:
            self._store(one, event)

    def expect(self, member: int, hashes: Sequence[int], known: int) -> None:
        """Note a prompt that is sent to a member: for a while its blocks count as held there.

        So prompts with the same new prefix go together before the first one is computed. ``known``
        is how many of the first blocks count already, as `overlaps` says.
        """
        one = self._members[member]
        if known:
            one.held.use(hashes[known - 1])
        if known < len(hashes):
            self._expected.add(one.bit, hashes, known)

    # ---- look-up ---------------------------------------------------------------------------------

    def overlaps(self, hashes: Sequence[int]) -> list[Overlap]:
        """Return who holds how many of a prompt's first blocks, the most first.

        A member that holds the first one is in one of the sets, others in none.
        """
        found = self._held(hashes)
        if reach := self._expected.reach(hashes, found[0].blocks if found else 0):
            return _with_expected(found, reach)
        return found

    def _held(self, hashes: Sequence[int]) -> list[Overlap]:
        found = []
        holders = self._holders.get
        alive = seen = -1
        depth = 0
        for depth, block in enumerate(hashes):
            members = holders(block, 0)
            if members is seen:
                continue
            seen = members
            still = alive & members
            if still != alive:
                if depth:
                    found.append(Overlap(depth, alive ^ still))
                if not still:
                    break
                alive = still
        else:
            if hashes:
                found.append(Overlap(depth + 1, alive))
        found.reverse()
        return found

    # ---- the sets --------------------------------------------------------------------------------

    def _store(self, member: _Member, event: BlocksStored) -> None:
        held = member.held
        before = len(held)
        held.store(event.hashes, event.parent, event.medium)
        self.blocks += len(held) - before
        self._mark(member, event.hashes)
        if 2 * held.young > self.max_blocks // len(self._members):
            self._drop(member, held.forget())

    def _drop(self, member: _Member, hashes: Collection[int]) -> None:
        self._unmark(member, hashes)
        self.blocks -= len(hashes)

    def _mark(self, member: _Member, hashes: Iterable[int]) -> None:
        """Add a member to blocks; equal sets of a chain stay one object."""
        holders, bit = self._holders, member.bit
        before, after = 0, bit
        for block in hashes:
            members = holders.get(block, 0)
            if members is not before:
                before = members
                after = (members if members & bit else members | bit) if members else bit
            holders[block] = after

    def _unmark(self, member: _Member, hashes: Iterable[int]) -> None:
        """Remove a member from blocks that have it."""
        holders, bit = self._holders, member.bit
        before, after = bit, 0
        for block in hashes:
            members = holders[block]
            if members is not before:
                before, after = members, members & ~bit
            if after:
                holders[block] = after
            else:
                del holders[block]

    def _clear(self, member: _Member) -> None:
        self._drop(member, member.held.hashes())
        self._expected.forget(member.bit)
        member.held = Holdings()


def _with_expected(held: list[Overlap], reach: dict[int, int]) -> list[Overlap]:
    """Move members to the overlap that they will have, if it is more than what they hold."""
    for overlap in held:
        for member in [m for m in reach if m & overlap.members and reach[m] <= overlap.blocks]:
            del reach[member]
    moved = sum(reach)
    found = [Overlap(o.blocks, o.members & ~moved) for o in held if o.members & ~moved]
    found += [Overlap(blocks, member) for member, blocks in reach.items()]
    found.sort(reverse=True)
    return found
