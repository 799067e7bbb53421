"""Which members hold which KV blocks: one model's prefix caches, as their events tell them.

A member is one prefix cache: a worker, or one of its data-parallel ranks. It has a small number,
and sets of members are ints with one bit per member. Blocks of one chain that have the same members
share one int object, so that a prompt's prefix, which a thousand members may hold, is looked up
with one comparison of pointers per block.

A cache of 500,000 blocks takes half a second to store or remove. So a call does a part of that, and
`work` the rest. Until then new blocks aren't found, and removed ones still are: a wrong guess costs
one prompt that is computed anew.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, KvEvent
from millstream_server.routing.prefix.holdings import ExpectedPrompts, Holdings

DEFAULT_MAX_BLOCKS = 2_000_000
"""About 240 MB, when full: the caches of 64 workers with 500,000 tokens each, in blocks of 16."""
_BLOCKS_AT_ONCE = 8192
"""Stored or removed in one call, some 5 ms."""


class Overlap(NamedTuple):
    """Members that hold a prompt's first blocks, and not the next one."""

    blocks: int
    """How many; at least one."""
    members: int
    """The members, as bits."""


class _Member:
    """One member's blocks."""

    __slots__ = ("bit", "due", "gone", "held", "left", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.bit = 1 << number
        self.held = Holdings()
        self.due: deque[BlocksStored | BlocksRemoved] = deque()
        """Events that are not applied yet."""
        self.gone = 0
        """How many groups of blocks it doesn't hold any more, and is still found with."""
        self.left = False


class PrefixIndex:
    """Bounded: each member may have an equal share of ``max_blocks``.

    Beyond its share, the blocks of a member that were not stored or used for longest are forgotten,
    leaves first (`Holdings`). Requests then go where less is known to be cached; nothing else
    changes. Not thread-safe.
    """

    def __init__(
        self, max_blocks: int = DEFAULT_MAX_BLOCKS, now: Callable[[], float] = time.monotonic
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
        self._numbers = 0
        """How many numbers there are."""
        self._due: deque[_Member] = deque()
        """Members with events that are not applied yet."""
        self._gone: deque[tuple[_Member, Iterator[int]]] = deque()
        """Blocks that members don't hold any more, and are still found with."""
        self._expected = ExpectedPrompts(max_blocks // 4, now)

    # ---- members ---------------------------------------------------------------------------------

    def join(self) -> int:
        """Add a member without blocks; return its number."""
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number, self._numbers = self._numbers, self._numbers + 1
        self._members[number] = _Member(number)
        return number

    def leave(self, member: int) -> None:
        """Remove a member and its blocks; its number may be given to another."""
        one = self._members.pop(member)
        self._clear(one)
        one.left = True
        if one.gone:
            self.work()
        else:
            heapq.heappush(self._free, member)

    def held(self, member: int) -> set[int]:
        """Return a member's blocks; not the expected ones, nor those of events that are due."""
        return self._members[member].held.hashes()

    # ---- changes ---------------------------------------------------------------------------------

    def apply(self, member: int, events: Iterable[KvEvent]) -> None:
        """Apply changes of a member's cache, in order; of many, a part (`work`)."""
        one = self._members[member]
        was_due = bool(one.due)
        for event in events:
            if isinstance(event, CacheCleared):
                self._clear(one)
            else:
                one.due.append(event)
        if one.due and not was_due:
            self._due.append(one)
        self.work()

    def replace(self, member: int, stored: Iterable[BlocksStored]) -> None:
        self.apply(member, [CacheCleared(), *stored])

    def work(self) -> bool:
        """Do a part of what is due, some milliseconds; return whether more is."""
        left = _BLOCKS_AT_ONCE
        while left > 0 and self._due:
            one = self._due[0]
            if one.due:
                event = one.due.popleft()
                left -= len(event.hashes)
                self._take(one, event)
            if not one.due:
                self._due.popleft()
        while left > 0 and self._gone:
            left -= self._unmark_gone(left)
        return bool(self._due or self._gone)

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

    def _take(self, member: _Member, event: BlocksStored | BlocksRemoved) -> None:
        held = member.held
        before = len(held)
        if isinstance(event, BlocksStored):
            held.store(event.hashes, event.parent, event.medium)
            self._mark(member, event.hashes)
            if 2 * held.young > self.max_blocks // len(self._members):
                self._put_away(member, held.forget())
        else:
            self._unmark(member, held.remove(event.hashes, event.medium))
        self.blocks += len(held) - before

    def _mark(self, member: _Member, hashes: Iterable[int]) -> None:
        holders, bit = self._holders, member.bit
        before, after = 0, bit
        for block in hashes:
            members = holders.get(block, 0)
            if members is not before:
                before = members
                after = (members if members & bit else members | bit) if members else bit
            holders[block] = after

    def _unmark(self, member: _Member, hashes: Iterable[int]) -> None:
        holders, bit = self._holders, member.bit
        before, after = bit, 0
        for block in hashes:
            members = holders.get(block, 0)
            if members is not before:
                before, after = members, members & ~bit
            if after:
                holders[block] = after
            else:
                holders.pop(block, None)

    def _clear(self, member: _Member) -> None:
        held, member.held = member.held, Holdings()
        self.blocks -= len(held)
        self._put_away(member, held.blocks())
        self._expected.forget(member.bit)
        member.due.clear()

    def _put_away(self, member: _Member, blocks: Iterable[int]) -> None:
        """Have `work` remove a member from blocks that it doesn't hold any more."""
        member.gone += 1
        self._gone.append((member, iter(blocks)))

    def _unmark_gone(self, most: int) -> int:
        """Remove up to ``most`` blocks; return how many, at least 1."""
        member, blocks = self._gone[0]
        some = list(itertools.islice(blocks, most))
        held = member.held
        self._unmark(member, [block for block in some if block not in held])
        if len(some) < most:
            self._gone.popleft()
            member.gone -= 1
            if member.left and not member.gone:
                heapq.heappush(self._free, member.number)
        return max(len(some), 1)


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
