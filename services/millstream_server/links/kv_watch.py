"""Follows a worker's KV events, over all connections to it; the rules of kv_events.proto."""

from __future__ import annotations

import asyncio

from millstream.v1 import kv_events_pb2, worker_pb2
from millstream_server.control.engine import WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.kv_cache.events import (
    BlocksStored,
    KvChanges,
    KvMessage,
    KvPosition,
    KvSnapshotPart,
)
from millstream_server.links.channel import CallError, Channel, rpc_of
from millstream_server.protobuf.kv_events import kv_message_from_proto, kv_position_to_proto
from millstream_server.routing.prefix.index import PrefixIndex
from millstream_server.routing.prefix.prefixes import Membership, Prefixes
from millstream_server.routing.workers import WorkerView, info_of
from millstream_server.runtime.errors import Code
from millstream_server.runtime.telemetry.log import get_log


class RankReplica:
    """Keeps one member of an index equal to one rank's cache, over any number of streams.

    `position` is what the next stream begins with; None: with a snapshot.
    """

    def __init__(self, index: PrefixIndex, member: int) -> None:
        """Start without a position; ``member`` is the rank's number in the index."""
        self.position: KvPosition | None = None
        self._index = index
        self._member = member
        self._parts: list[BlocksStored] | None = None
        """The incomplete snapshot; None: none has begun."""
        self._collected = 0
        """About how many hashes it takes the memory of."""

    def forget(self) -> None:
        self.position = self._parts = None
        self._index.replace(self._member, ())

    def begin(self) -> None:
        """Prepare for a new stream: a snapshot that was not completed begins anew."""
        self._parts = None

    def take(self, message: KvMessage) -> bool:
        """Take a message of this rank; return False if messages before it are missing.

        The caller must then drop the stream and open a new one. `position` is None then.
        """
        content = message.content
        if isinstance(content, KvSnapshotPart):
            fits = self._collect(message, content)
        else:
            fits = self._follow(message, content)
        if not fits:
            self.position = self._parts = None
        return fits

    def _collect(self, message: KvMessage, part: KvSnapshotPart) -> bool:
        if part.first:
            self._parts, self._collected = [], 0
        if self._parts is None:
            return False
        # The index keeps no more blocks; so a snapshot without an end takes no more memory.
        if self._collected < self._index.max_blocks:
            self._parts += part.stored
            self._collected += sum(map(_size, part.stored))
        if part.last:
            self._index.replace(self._member, self._parts)
            self._parts = None
            self._arrive_at(message)
        return True

    def _follow(self, message: KvMessage, changes: KvChanges) -> bool:
        position = self.position
        if position is None or message.log_id != position.log_id:
            return False
        if message.sequence <= position.sequence:
            return True
        if changes.first_sequence > position.sequence + 1:
            return False
        self._index.apply(self._member, changes.events)
        self._arrive_at(message)
        return True

    def _arrive_at(self, message: KvMessage) -> None:
        self.position = KvPosition(message.dp_rank, message.log_id, message.sequence)


def _size(stored: BlocksStored) -> int:
    return len(stored.hashes) + len(stored.adapter) // 8 + 1


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
        self._prefixes = prefixes
        self._view = view
        self._membership: Membership | None = None
        self._replicas: dict[int, RankReplica] = {}
        """By data-parallel rank."""

    async def run(self, channel: Channel, description: WorkerDescription) -> None:
        """Follow the events on one connection; returns if the worker has none."""
        engine = info_of(description, GeneratorInfo)
        membership = self._prefixes.admit(self._view, description)
        if membership is None or engine is None or not engine.tells_kv:
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
