"""Every method that a server offers, as its reflection tells: new services join by themselves."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

_V1, _V1ALPHA = "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"


@dataclass(frozen=True)
class Target:
    """One method of one process."""

    server: str
    """Name of the process."""
    address: str
    path: str
    """``/package.Service/Method``."""
    method: MethodDescriptor


def discover(server: str, address: str, channel: grpc.Channel | None = None) -> list[Target]:
    """Ask a server for its services; those of reflection v1 are described by v1alpha's proto.

    ``channel`` is one to the address, closed at the end; None makes one without TLS.
    """
    with channel or grpc.insecure_channel(address) as opened:
        database = ProtoReflectionDescriptorDatabase(opened)
        pool = DescriptorPool(database)
        targets = []
        for name in database.get_services():
            service: ServiceDescriptor = pool.FindServiceByName(_V1ALPHA if name == _V1 else name)
            targets += [
                Target(server, address, f"/{name}/{method.name}", method)
                for method in service.methods
            ]
    assert targets, f"{server} names no services"
    return targets
