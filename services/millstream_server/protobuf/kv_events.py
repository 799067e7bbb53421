"""Conversion of KV events to messages and back."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.v1 import kv_events_pb2
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvChanges,
    KvEvent,
    KvMessage,
    KvPosition,
    KvSnapshotPart,
    Medium,
)

_MEDIA_TO_PROTO = {m: kv_events_pb2.KvMedium.Value(f"KV_MEDIUM_{m.name}") for m in Medium}
_MEDIA = {value: medium for medium, value in _MEDIA_TO_PROTO.items()}


def kv_position_to_proto(position: KvPosition) -> kv_events_pb2.KvEventsPosition:
    """Convert a reader's position."""
    return kv_events_pb2.KvEventsPosition(
        dp_rank=position.dp_rank, log_id=position.log_id, sequence=position.sequence
    )


def kv_position_from_proto(message: kv_events_pb2.KvEventsPosition) -> KvPosition:
    """Convert a reader's position."""
    return KvPosition(message.dp_rank, message.log_id, message.sequence)


def kv_message_to_proto(message: KvMessage) -> kv_events_pb2.WatchKvEventsResponse:
    """Convert one message of the stream."""
    response = kv_events_pb2.WatchKvEventsResponse(
        dp_rank=message.dp_rank, log_id=message.log_id, sequence=message.sequence
    )
    content = message.content
    if isinstance(content, KvSnapshotPart):
        snapshot = response.snapshot
        snapshot.first, snapshot.last = content.first, content.last
        snapshot.stored.extend(map(_stored_to_proto, content.stored))
    else:
        response.first_sequence = content.first_sequence
        response.events.events.extend(map(_event_to_proto, content.events))
    return response


def kv_message_from_proto(response: kv_events_pb2.WatchKvEventsResponse) -> KvMessage:
    """Convert one message of the stream.

    Events and media that this version doesn't know are left out: such blocks count as not cached.
    """
    content: KvChanges | KvSnapshotPart
    if response.WhichOneof("content") == "snapshot":
        snapshot = response.snapshot
        stored = tuple(_stored_from_proto(snapshot.stored))
        content = KvSnapshotPart(snapshot.first, snapshot.last, stored)
    else:
        events = tuple(_events_from_proto(response.events.events))
        content = KvChanges(response.first_sequence, events)
    return KvMessage(response.dp_rank, response.log_id, response.sequence, content)


def _stored_to_proto(stored: BlocksStored) -> kv_events_pb2.KvBlocksStored:
    return kv_events_pb2.KvBlocksStored(
        hashes=stored.hashes,
        parent_hash=stored.parent,
        medium=_MEDIA_TO_PROTO[stored.medium],
        adapter=stored.adapter,
    )


def _event_to_proto(event: KvEvent) -> kv_events_pb2.KvEvent:
    match event:
        case BlocksStored():
            return kv_events_pb2.KvEvent(stored=_stored_to_proto(event))
        case BlocksRemoved():
            removed = kv_events_pb2.KvBlocksRemoved(
                hashes=event.hashes, medium=_MEDIA_TO_PROTO[event.medium]
            )
            return kv_events_pb2.KvEvent(removed=removed)
        case CacheCleared():
            return kv_events_pb2.KvEvent(cleared=kv_events_pb2.KvCacheCleared())


def _stored_from_proto(messages: Iterable[kv_events_pb2.KvBlocksStored]) -> Iterable[BlocksStored]:
    for message in messages:
        if (medium := _MEDIA.get(message.medium)) is not None:
            parent = message.parent_hash if message.HasField("parent_hash") else None
            yield BlocksStored(tuple(message.hashes), parent, medium, message.adapter)


def _events_from_proto(messages: Iterable[kv_events_pb2.KvEvent]) -> Iterable[KvEvent]:
    for message in messages:
        match message.WhichOneof("event"):
            case "stored":
                yield from _stored_from_proto((message.stored,))
            case "removed" if (medium := _MEDIA.get(message.removed.medium)) is not None:
                yield BlocksRemoved(tuple(message.removed.hashes), medium)
            case "cleared":
                yield CacheCleared()
