"""The policies by their names in settings; of them `kv_aware`: where the first token comes soonest.

The cost of a place is an estimate of the time to the first token, as the prompt tokens that it
could compute meanwhile:

    uncached tokens of the prompt + what waits before it (`load_levels.waiting_tokens`)

A prefix that many requests have so doesn't overload its holder: once more waits there than another
place takes to compute the prefix anew, the request goes there, which then holds it as well. Only
the least loaded holder of each length of prefix is looked at, and the least loaded place of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream_server.control.engine import Role
from millstream_server.routing.candidates import members_of
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import (
    BestInRotation,
    BestOfTwo,
    PolicyName,
    RoutingPolicy,
    score_by_session,
)
from millstream_server.routing.prefix.prefixes import CachedBy, LoadLevels, Prefixes
from millstream_server.routing.workers import Candidate


class KvAware:
    """A `RoutingPolicy`; the candidates must have been admitted to ``prefixes``.

    Without a prompt, as for files to be encoded, and where no worker tells what it caches, it picks
    by load. Where only some tell, the others count as empty.
    """

    def __init__(self, prefixes: Prefixes) -> None:
        self._prefixes = prefixes
        self._by_load = BestInRotation()

    def pick(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Candidate | None:
        model = self._prefixes.of(request.model)
        if not (request.token_ids and model.tells_kv and len(candidates) > 1):
            return self._by_load.pick(request, candidates)
        cached = model.overlaps(request).cached if _runs_prompts(candidates) else ()
        length = len(request.token_ids)
        return model.places[_cheapest(length, cached, members_of(candidates), model.levels)]


def _runs_prompts(candidates: Sequence[Candidate]) -> bool:
    """Return whether candidates compute prompts: decode workers get them computed."""
    description = candidates[0].worker.description
    return description is None or description.role is not Role.DECODE


def _cheapest(length: int, cached: Sequence[CachedBy], members: int, levels: LoadLevels) -> int:
    chosen, least = -1, float("inf")
    for tokens, holders in (*cached, (0, members)):
        uncached = length - tokens
        if uncached >= least:
            break
        if holders := holders & members:
            member = levels.least(holders)
            cost = uncached + levels.load(member)
            if cost < least:
                chosen, least = member, cost
    return chosen


def make_policy(name: PolicyName, prefixes: Prefixes | None = None) -> RoutingPolicy:
    """Make the policy with this name.

    Raises:
        ValueError: KV_AWARE without ``prefixes``, which it decides by.
    """
    match name:
        case PolicyName.ROUND_ROBIN:
            return BestInRotation(score_by_session)
        case PolicyName.POWER_OF_TWO:
            return BestOfTwo()
        case PolicyName.LEAST_LOADED:
            return BestInRotation()
        case PolicyName.KV_AWARE:
            if prefixes is None:
                raise ValueError("kv_aware needs a prefix index")
            return KvAware(prefixes)
