"""Where SGLang's schedulers send their KV events, and whether they have any to send.

This process binds the sockets of events and the schedulers connect: so it misses nothing while it
starts, and schedulers on other machines reach it without a list of their addresses. The sockets of
the replay are SGLang's, so only schedulers on this machine have one.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from pathlib import Path

from millstream_server.engines.base import Role
from millstream_server.engines.sglang.config import SglangEngineConfig, data_parallel_ranks
from millstream_server.runtime.errors import EngineFailedError

# SGLang sends a replay in one go, and ZeroMQ drops what is above 1,000 messages in a queue.
REPLAYED_BATCHES = 900
QUEUED_BATCHES = 10_000
"""Batches that wait in a socket; further ones are lost and have to be replayed."""


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
            "buffer_steps": REPLAYED_BATCHES,
            "hwm": QUEUED_BATCHES,
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
    """Choose the addresses; ``directory`` is this process's own. None: there are no events.

    Raises:
        EngineFailedError: `leader_address` doesn't resolve.
    """
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
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        message = f"leader_address: {host!r} does not resolve to an address."
        raise EngineFailedError(message) from error
    address = str(found[0][4][0])
    return f"[{address}]" if ":" in address else address
