"""Conversion of a worker's description, of any ability; an ability adds its own fields."""

from __future__ import annotations

from importlib.metadata import version

from millstream.v1 import worker_pb2
from millstream_server.engines.base import Role, WorkerDescription

ENGINE_FIELDS = ("engine", "engine_version", "max_running_requests", "dp_size", "weight_version")
"""Fields of WorkerInfo with the same name in EngineInfo."""
CONTRACT_VERSION = "1.1"
"""MAJOR.MINOR; raise MINOR with every release that adds to the contract."""
ROLES_TO_PROTO = {role: worker_pb2.WorkerRole.Value(f"WORKER_ROLE_{role.name}") for role in Role}


def info_to_proto(description: WorkerDescription) -> worker_pb2.WorkerInfo:
    """Convert the fields that every worker has."""
    engine = description.engine
    return worker_pb2.WorkerInfo(
        worker_id=description.worker_id,
        role=ROLES_TO_PROTO[description.role],
        model=description.model,
        millstream_version=version("millstream"),
        contract_version=CONTRACT_VERSION,
        **{name: getattr(engine, name) for name in ENGINE_FIELDS},
    )
