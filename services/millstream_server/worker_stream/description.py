"""What a worker is, as it tells it and as the Processor reads it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from importlib.metadata import version

from millstream.v1 import worker_pb2
from millstream_server.engines.base import Ability, EngineInfo, Role

# Fields of WorkerInfo that are EngineInfo's, name for name.
_ENGINE_FIELDS = (
    "engine",
    "engine_version",
    "vocab_size",
    "context_length",
    "block_size",
    "total_blocks",
    "max_running_requests",
    "dp_size",
    "weight_version",
    "bootstrap_host",
    "bootstrap_port",
)
_ABILITIES = {worker_pb2.EngineAbility.Value(f"ENGINE_ABILITY_{a.name}"): a for a in Ability}
_ROLES = {worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.name}"): role for role in Role}
ROLES_TO_PROTO = {role: value for value, role in _ROLES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDescription:
    """A loaded worker. ``worker_id`` is random: a restarted worker has another."""

    role: Role
    model: str
    engine: EngineInfo
    worker_id: str = field(default_factory=lambda: secrets.token_hex(8))


def description_to_proto(description: WorkerDescription) -> worker_pb2.WorkerInfo:
    """Write it."""
    engine = description.engine
    return worker_pb2.WorkerInfo(
        worker_id=description.worker_id,
        role=ROLES_TO_PROTO[description.role],
        model=description.model,
        abilities=[value for value, a in sorted(_ABILITIES.items()) if a in engine.abilities],
        millstream_version=version("millstream"),
        **{name: getattr(engine, name) for name in _ENGINE_FIELDS},
    )


def description_from_proto(info: worker_pb2.WorkerInfo) -> WorkerDescription:
    """Read it; abilities of a newer version are left out.

    Raises:
        ValueError: its role is none we know.
    """
    if info.role not in _ROLES:
        message = f"the worker says that its role is {info.role}"
        raise ValueError(message)
    return WorkerDescription(
        worker_id=info.worker_id,
        role=_ROLES[info.role],
        model=info.model,
        engine=EngineInfo(
            abilities=frozenset(_ABILITIES[a] for a in info.abilities if a in _ABILITIES),
            **{name: getattr(info, name) for name in _ENGINE_FIELDS},
        ),
    )
