"""KV events from SGLang's schedulers to a sink of ours.

This process binds the sockets of events and the schedulers connect: so it misses nothing while it
starts, and schedulers on other machines reach it without a list of their addresses. The sockets of
the replay are SGLang's, so only schedulers on this machine have one.

What finds an address or binds it raises EngineFailedError: it can't.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from millstream_server.control.engine import Role
from millstream_server.engines.kv_feed import LIMITS, RankFeed
from millstream_server.engines.sglang.config import (
    SglangEngineConfig,
    data_parallel_ranks,
    first_address,
)
from millstream_server.runtime.telemetry.log import get_log


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEndpoints:
    """ZeroMQ addresses of each rank, made from those of the first as SGLang does it."""

    events: str
    """What a scheduler connects to; of rank 0."""
    bound: str
    """The same as this process binds it."""
    replay: str = ""
    """What a scheduler binds; of rank 0. Empty: no rank has one."""
    ranks: int
    local_ranks: int
    """Those on this machine: the first ones."""

    def publisher(self) -> str:
        """Return SGLang's `kv_events_config`."""
        config = {
            "publisher": "zmq",
            "endpoint": self.events,
            "bind": False,
            "replay_endpoint": self.replay or None,
            **LIMITS,
        }
        return json.dumps(config)

    def bound_of(self, dp_rank: int) -> str:
        """Return where this process listens for a rank's events."""
        return _of_rank(self.bound, dp_rank)

    def replay_of(self, dp_rank: int) -> str:
        """Return where a rank replays events; empty: nowhere."""
        return _of_rank(self.replay, dp_rank) if self.replay and dp_rank < self.local_ranks else ""


def _of_rank(endpoint: str, dp_rank: int) -> str:
    start, _, number = endpoint.rpartition(":")
    return f"{start}:{int(number) + dp_rank}"


def publishes(config: SglangEngineConfig) -> bool:
    """Return whether an engine has a prefix cache whose blocks have the contract's hashes."""
    extra = config.extra
    if not config.kv_events or extra.get("disable_radix_cache"):
        return False
    if extra.get("speculative_algorithm") not in {None, "NGRAM"}:
        return False  # EAGLE and its kin key the cache by pairs of tokens
    if config.role is Role.DECODE:
        return bool(extra.get("disaggregation_decode_enable_radix_cache"))
    return config.role is not Role.EMBEDDING


def endpoints(config: SglangEngineConfig, directory: Path) -> KvEndpoints | None:
    """Choose the addresses; ``directory`` is this process's own. None: there are no events."""
    if not publishes(config):
        return None
    ranks = data_parallel_ranks(config.extra)
    # SGLang puts a rank's number behind the last colon; "tcp" in it makes it do that to ipc, too.
    replay = f"ipc://{directory}/tcp-replay:0"
    if config.nodes == 1 or not spread(config):
        events = f"ipc://{directory}/tcp-events:0"
        local = KvEndpoints(
            events=events, bound=events, replay=replay, ranks=ranks, local_ranks=ranks
        )
        return local if config.node_rank == 0 else None
    if not config.kv_events_port:
        return None
    host = config.leader_address.rpartition(":")[0]
    leads = config.node_rank == 0
    return KvEndpoints(
        events=f"tcp://{host}:{config.kv_events_port}",
        bound=f"tcp://{_address(host)}:{config.kv_events_port}" if leads else "",
        replay=replay if leads else "",
        ranks=ranks,
        local_ranks=max(1, ranks * int(str(config.extra.get("pp_size") or 1)) // config.nodes),
    )


def spread(config: SglangEngineConfig) -> bool:
    """Return whether data-parallel ranks are on several machines."""
    return config.nodes > 1 and data_parallel_ranks(config.extra) > 1


def _address(host: str) -> str:
    """Return the address to bind for a host's name."""
    address = first_address(host.strip("[]"), "leader_address")
    return f"[{address}]" if ":" in address else address


log = get_log(__name__)

_TRANSLATION = "millstream_server.engines.sglang.kv_events.translation"


class KvEventFeed(RankFeed):
    """Follows all ranks' events: `follow`, `open`, `started`, `close`; see `RankFeed`."""

    def open(self, config: SglangEngineConfig) -> SglangEngineConfig:
        """Listen for events; return the configuration that makes the schedulers send them.

        Raises:
            EngineFailedError: an address can't be bound.
        """
        if self._sink is None:
            return config
        there = endpoints(config, self._make_folder())
        if there is None:
            if publishes(config):
                log.warning("KV events of several machines need --kv-events-port: there are none")
            return config
        addresses = [(there.bound_of(rank), there.replay_of(rank)) for rank in range(there.ranks)]
        self._read(self._sink, addresses, _TRANSLATION, binds=True)
        return replace(config, kv_publisher=there.publisher())

    def started(self) -> bool:
        """Ask for the events that came before the schedulers had reached this process.

        Returns whether there are any ranks to follow.
        """
        return self._catch_up()


def with_publisher(config: SglangEngineConfig) -> SglangEngineConfig:
    """Make a follower's schedulers send their events to the leader, if they have ranks' own."""
    if not (spread(config) and config.kv_events_port):
        return config
    there = endpoints(config, Path())
    return config if there is None else replace(config, kv_publisher=there.publisher())
