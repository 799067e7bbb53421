"""Follows a worker's KV events, over all connections to it."""

from __future__ import annotations

import asyncio

from millstream.v1 import kv_events_pb2, worker_pb2
from millstream_server.engines.base import WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.links.channel import CallError, Channel, rpc_of
from millstream_server.protobuf.kv_events import kv_message_from_proto, kv_position_to_proto
from millstream_server.routing.prefix.prefixes import Membership, Prefixes
from millstream_server.routing.prefix.replica import RankReplica
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import Code
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_WATCH = rpc_of(worker_pb2.DESCRIPTOR, "WorkerService/WatchKvEvents")
_RETRY_S = 0.5
_MAX_BYTES = 1 << 20
"""Of a message; the contract's limit."""
_MAX_EVENTS = 1 << 16
"""Of a message: one with a hash takes 16 bytes."""


class KvWatch:
    """Keeps a worker's members of the prefix index equal to its caches.

    What is known outlives a connection: the next one goes on where it ended, unless the worker was
    restarted. The index forgets the worker when its link is removed from the router.
    """

    def __init__(self, prefixes: Prefixes, view: WorkerView) -> None:
        """Prepare; nothing is known yet."""
        self._prefixes = prefixes
        self._view = view
        self._membership: Membership | None = None
        self._replicas: dict[int, RankReplica] = {}
        """By data-parallel rank."""

    async def run(self, channel: Channel, description: WorkerDescription) -> None:
        """Follow the events on one connection; returns if the worker has none."""
        engine = description.engine
        membership = self._prefixes.admit(self._view, description)
        if membership is None or not isinstance(engine, GeneratorInfo) or not engine.tells_kv:
            return
        if membership is not self._membership:
            self._membership = membership
            index = membership.prefixes.index
            self._replicas = {
                rank: RankReplica(index, place.member)
                for rank, place in enumerate(membership.places, engine.dp_start)
            }
        offered = True
        while offered:
            offered = await self._follow(channel, membership)
            await asyncio.sleep(_RETRY_S if offered else 0)

    async def _follow(self, channel: Channel, membership: Membership) -> bool:
        """Read one stream to its end; return whether the worker offers it.

        Raises:
            ValueError: the worker isn't the one that it was when the connection began.
        """
        watch = channel.watch(_WATCH, self._request())
        try:
            while (response := await watch.read()) is not None:
                if not self._prefixes.has(self._view, membership):
                    raise ValueError("the worker's data-parallel ranks or blocks have changed")
                if problem := _problem(response):
                    self._give_up(membership, problem)
                    return False
                replica = self._replicas.get(response.dp_rank)
                if replica and not replica.take(kv_message_from_proto(response)):
                    log.info("KV events are missing", worker=self._view.address)
                    return True
                # A large cache takes half a second; others run between two parts.
                while membership.prefixes.index.work():  # noqa: ASYNC110
                    await asyncio.sleep(0)
                membership.prefixes.count_blocks()
        except CallError as error:
            log.debug("KV events ended", worker=self._view.address, code=error.code.name)
            return error.code not in {Code.UNIMPLEMENTED, Code.INVALID_ARGUMENT}
        finally:
            watch.cancel()
        return True

    def _give_up(self, membership: Membership, problem: str) -> None:
        """Forget what is known: the worker doesn't keep to the contract.

        Requests go to it as to a worker without KV events.
        """
        for replica in self._replicas.values():
            replica.forget()
        membership.prefixes.count_blocks()
        log.error("a worker's KV events can't be used", worker=self._view.address, problem=problem)

    def _request(self) -> kv_events_pb2.WatchKvEventsRequest:
        for replica in self._replicas.values():
            replica.begin()
        known = [replica.position for replica in self._replicas.values()]
        return kv_events_pb2.WatchKvEventsRequest(
            positions=[kv_position_to_proto(position) for position in known if position]
        )


def _problem(response: kv_events_pb2.WatchKvEventsResponse) -> str:
    """Return why a message must not be read, which would take too long; empty: it may."""
    if (nbytes := response.ByteSize()) > _MAX_BYTES:
        return f"a message has {nbytes} bytes; {_MAX_BYTES} are allowed"
    events = len(response.snapshot.stored) + len(response.events.events)
    if events > _MAX_EVENTS:
        return f"a message has {events} events; {_MAX_EVENTS} are allowed"
    return ""
