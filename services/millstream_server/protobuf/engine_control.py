"""Conversion of operations on an engine to messages and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from millstream.v1 import engine_control_pb2 as pb
from millstream_server.control.operations import (
    BroadcastWeights,
    IpcWeights,
    LoraAdapter,
    MemoryTag,
    MemoryUse,
    NamedTensor,
    PauseMode,
    ProfileActivity,
)
from millstream_server.protobuf.common import known, seconds
from millstream_server.protobuf.media import spec_from_proto
from millstream_server.runtime.errors import InvalidRequestError

_TAGS_TO_PROTO = {tag: pb.MemoryTag.Value(f"MEMORY_TAG_{tag.name}") for tag in MemoryTag}
_TAGS: dict[Any, MemoryTag] = {value: tag for tag, value in _TAGS_TO_PROTO.items()}
_ACTIVITIES: dict[Any, ProfileActivity] = {
    pb.ProfileActivity.Value(f"PROFILE_ACTIVITY_{activity.name}"): activity
    for activity in ProfileActivity
}
_MODES: dict[Any, PauseMode] = {
    pb.PAUSE_MODE_UNSPECIFIED: PauseMode.IN_PLACE,
    **{pb.PauseMode.Value(f"PAUSE_MODE_{mode.name}"): mode for mode in PauseMode},
}
_MOST_VALUES = 64
"""Most values of an enum in one list, each of which may come several times."""
T = TypeVar("T")


def tags_from_proto(tags: Sequence[Any]) -> frozenset[MemoryTag]:
    """Convert memory tags.

    Raises:
        InvalidRequestError: one isn't set or not known, or they are too many.
    """
    return _known_set("tags", _TAGS, tags)


def tags_to_proto(tags: Iterable[MemoryTag]) -> list[Any]:
    """Convert memory tags, in the contract's order."""
    return sorted(_TAGS_TO_PROTO[tag] for tag in tags)


def use_to_proto(use: MemoryUse) -> pb.MemoryUse:
    """Convert a measured use of memory."""
    return pb.MemoryUse(host_bytes=use.host_bytes, device_bytes=use.device_bytes)


def mode_from_proto(mode: Any) -> PauseMode:
    """Convert a pause's mode.

    Raises:
        InvalidRequestError: it isn't known.
    """
    return known("mode", _MODES, mode)


def activities_from_proto(activities: Sequence[Any]) -> frozenset[ProfileActivity]:
    """Convert what a profile is to record.

    Raises:
        InvalidRequestError: one isn't set or not known, or they are too many.
    """
    return _known_set("activities", _ACTIVITIES, activities)


def timeout_from_proto(message: Any, field: str = "timeout") -> float | None:
    """Convert the longest time to wait, in seconds; None: it isn't set.

    Raises:
        InvalidRequestError: it is negative.
    """
    if not message.HasField("timeout"):
        return None
    found = seconds(message.timeout)
    if found < 0:
        raise InvalidRequestError.of(field, "must not be negative")
    return found


def adapter_to_proto(adapter: LoraAdapter) -> pb.LoadedLora:
    """Convert a loaded adapter."""
    path = str(adapter.path) if adapter.path else ""
    return pb.LoadedLora(name=adapter.name, path=path, rank=adapter.rank)


def tensor_from_proto(message: pb.WeightTensor, field: str) -> NamedTensor:
    """Convert a tensor's name and description; ``field`` is its path.

    Raises:
        InvalidRequestError: no dense tensor of an allowed size has it.
    """
    return NamedTensor(message.name, spec_from_proto(message.spec, f"{field}.spec"))


def broadcast_from_proto(message: pb.WeightsBroadcast) -> BroadcastWeights:
    """Convert the tensors of a process group.

    Raises:
        InvalidRequestError: a tensor's description can't be.
    """
    return BroadcastWeights(
        master_address=message.master_address,
        rank_offset=message.rank_offset,
        world_size=message.world_size,
        group_name=message.group_name,
        backend=message.backend,
        tensors=[
            tensor_from_proto(tensor, f"start.broadcast.tensors[{n}]")
            for n, tensor in enumerate(message.tensors)
        ],
    )


def ipc_from_proto(message: pb.WeightsByIpc) -> IpcWeights:
    """Convert the senders' addresses of tensors in GPUs' memory."""
    addresses: Mapping[str, str] = message.zmq_addresses
    return IpcWeights(dict(addresses))


def _known_set(field: str, values: dict[Any, T], given: Sequence[Any]) -> frozenset[T]:
    if len(given) > _MOST_VALUES:
        raise InvalidRequestError.of(field, f"has {len(given)} values; {_MOST_VALUES} are allowed")
    return frozenset(known(f"{field}[{n}]", values, value) for n, value in enumerate(given))
