"""The addresses in a Kubernetes service's EndpointSlices."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from millstream_server.routing.discovery.base import Addresses, join
from millstream_server.runtime.settings.declare import is_port

PORT_NAME = "grpc"
_FAMILIES = ("IPv4", "IPv6")
"""The first is taken where a worker has both."""

Slice = Mapping[str, Any]
"""An object of discovery.k8s.io/v1, as the API server sends it."""


class UnusableSliceError(Exception):
    """A slice doesn't say where the workers are; the text says what to change."""


def addresses_of(slices: Iterable[Slice]) -> Addresses:
    """Return the address of each worker, once, in however many slices it is.

    A worker that isn't ready is among them: it tells its state on its link. One that is terminating
    is among them as long as it serves: it announces its drain itself.

    Raises:
        UnusableSliceError: the port isn't known, or an object is no EndpointSlice.
    """
    found: dict[str, tuple[int, str]] = {}
    for one in slices:
        for worker, family, address in _workers(one):
            found[worker] = min(found.get(worker, (family, address)), (family, address))
    return frozenset(address for _, address in found.values())


def _workers(one: Slice) -> Iterator[tuple[str, int, str]]:
    """Yield of each worker its identity, its address's family, and the address."""
    try:
        name = one["metadata"]["name"]
        kept = [endpoint for endpoint in one.get("endpoints") or () if _is_kept(endpoint)]
        if not kept:
            return
        if one["addressType"] not in _FAMILIES:
            raise UnusableSliceError(
                f"EndpointSlice {name} has addresses of type {one['addressType']!r}, not of "
                f"{' or '.join(_FAMILIES)}"
            )
        family = _FAMILIES.index(one["addressType"])
        port = _port(name, one.get("ports") or ())
        for endpoint in kept:
            # Further entries are for the same worker, and have no meaning of their own.
            address = join(str(ipaddress.ip_address(str(endpoint["addresses"][0]))), port)
            target = endpoint.get("targetRef") or {}
            yield str(target.get("uid") or address), family, address
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise UnusableSliceError(f"an EndpointSlice is not as it should be: {error!r}") from error


def _is_kept(endpoint: Mapping[str, Any]) -> bool:
    """Return whether a worker may be there. Conditions may be unknown: absent or null."""
    conditions = endpoint.get("conditions") or {}
    return not conditions.get("terminating") or conditions.get("serving") is not False


def _port(name: str, ports: Iterable[Mapping[str, Any]]) -> int:
    numbers = {
        port.get("name") or "": int(port["port"])
        for port in ports
        if port.get("port") and port.get("protocol", "TCP") == "TCP"
    }
    if wrong := [number for number in numbers.values() if not is_port(str(number))]:
        raise UnusableSliceError(f"EndpointSlice {name} has the port {wrong[0]}")
    if PORT_NAME in numbers:
        return numbers[PORT_NAME]
    if len(numbers) == 1:
        return next(iter(numbers.values()))
    has = f"the ports {', '.join(sorted(numbers))}" if numbers else "no TCP port"
    raise UnusableSliceError(
        f"EndpointSlice {name} has {has}: name the port of gRPC {PORT_NAME!r} in the service"
    )
