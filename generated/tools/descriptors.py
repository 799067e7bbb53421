"""Write the contract as one FileDescriptorSet, with the other protos that a client meets.

Those are google.rpc, which errors are made of, and grpc.health.v1. For `grpcurl -protoset`, `protoc
--descriptor_set_in` and buf, which then need no reflection, no network and no other proto files.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import FileDescriptor
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2

ROOT = Path(__file__).resolve().parents[2]
OUTPUT = "generated/descriptors/millstream.binpb"
_OTHERS = (code_pb2, error_details_pb2, status_pb2, health_pb2)
# Python's package has it under another path: in C++ a second copy of the same symbols.
_PATHS = {"grpc_health/v1/health.proto": "grpc/health/v1/health.proto"}


def _with_imports(file: FileDescriptor) -> Iterator[FileDescriptor]:
    """Yield imports before what imports them."""
    for imported in file.dependencies:
        yield from _with_imports(imported)
    yield file


def contract() -> descriptor_pb2.FileDescriptorSet:
    """Compile proto/, comments included."""
    built = subprocess.run(
        ["buf", "build", "proto", "--as-file-descriptor-set", "-o", "-#format=binpb"],  # noqa: S607
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return descriptor_pb2.FileDescriptorSet.FromString(built.stdout)


def write(root: Path) -> None:
    """Write the set below ``root``."""
    found = contract()
    known = {file.name for file in found.file}
    for other in _OTHERS:
        for file in _with_imports(other.DESCRIPTOR):
            if file.name not in known:
                known.add(file.name)
                added = found.file.add()
                file.CopyToProto(added)
                added.name = _PATHS.get(file.name, file.name)
    path = root / OUTPUT
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(found.SerializeToString(deterministic=True))
