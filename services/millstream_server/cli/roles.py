"""What workers' roles are called on the screen."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.v1 import worker_pb2

_NAMES: Mapping[int, str] = {
    worker_pb2.WORKER_ROLE_AGGREGATED: "aggregated",
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_ENCODE: "encode",
    worker_pb2.WORKER_ROLE_DIFFUSION: "diffusion",
    worker_pb2.WORKER_ROLE_EMBEDDING: "embedding",
}
_ORDER = list(_NAMES)


def role_name(role: int) -> str:
    """Return a role's name; a newer server may have roles that this command doesn't know."""
    return _NAMES.get(role, "unknown")


def role_order(role: int) -> int:
    """Return where a role stands in lists: in the order of a request's way."""
    return _ORDER.index(role) if role in _ORDER else len(_ORDER)
