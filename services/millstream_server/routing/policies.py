"""The policies by their names in settings."""

from __future__ import annotations

from millstream_server.routing.kv_aware import KvAware
from millstream_server.routing.policy import (
    BestInRotation,
    BestOfTwo,
    Policy,
    PolicyName,
    RoutingPolicy,
    score_by_load,
    score_by_session,
)
from millstream_server.routing.prefix.prefixes import Prefixes


def make_policy(name: PolicyName, prefixes: Prefixes | None = None) -> RoutingPolicy:
    """Make the policy with this name.

    Raises:
        ValueError: KV_AWARE without ``prefixes``, which it decides by.
    """
    match name:
        case PolicyName.ROUND_ROBIN:
            return Policy(score_by_session, BestInRotation())
        case PolicyName.POWER_OF_TWO:
            return Policy(score_by_load, BestOfTwo())
        case PolicyName.LEAST_LOADED:
            return Policy(score_by_load, BestInRotation())
        case PolicyName.KV_AWARE:
            if prefixes is None:
                raise ValueError("kv_aware needs a prefix index")
            return KvAware(prefixes)
