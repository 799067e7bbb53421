"""The workers behind a Kubernetes service, by its EndpointSlices."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any

from millstream_server.routing.discovery.kubernetes_api import (
    ApiError,
    ClusterAccess,
    ExpiredError,
    Slice,
    SlicesApi,
)
from millstream_server.routing.discovery.sources import Addresses, Failures, join, pause
from millstream_server.runtime.settings.declare import is_port
from millstream_server.runtime.telemetry.log import get_log

PORT_NAME = "grpc"
_FAMILIES = ("IPv4", "IPv6")
"""The first is taken where a worker has both."""


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


log = get_log(__name__)

_FIRST_PAUSE_S = 0.2
_MOST_PAUSE_S = 30.0
_LONG_WATCH_S = 10.0
"""A watch that lasted this long worked, though nothing happened."""


class KubernetesDiscovery:
    """Lists the EndpointSlices of a service, and watches them.

    A watch that ends is followed by the next from where it ended; one that fails, by a list. The
    pauses between them grow while nothing comes of it. Slices of a service that doesn't exist yet
    are an empty list.
    """

    def __init__(
        self,
        service: str,
        namespace: str = "",
        access: ClusterAccess | None = None,
        *,
        first_pause_s: float = _FIRST_PAUSE_S,
    ) -> None:
        """Follow ``service``; an empty ``namespace`` is the Processor's own.

        Raises:
            SettingsError: this is no cluster, or the client library isn't installed.
        """
        access = access or ClusterAccess()
        access.check()
        self._service = service
        self._namespace = namespace
        self._access = access
        self._first_pause_s = first_pause_s
        self._pause_s = first_pause_s
        self._slices: dict[str, Slice] = {}
        self._version = ""
        """Where the next watch begins; empty: list first."""
        self._name = f"{namespace}/{service}" if namespace else service
        self._failures = Failures(log, "workers not read from Kubernetes", self._name)

    async def watch(self) -> AsyncIterator[Addresses]:
        known: Addresses | None = None
        self._version = ""
        while True:
            try:
                async with (
                    self._access.open(self._service, self._namespace) as api,
                    aclosing(self._changes(api)) as changes,
                ):
                    async for _ in changes:
                        found = addresses_of(self._slices.values())
                        if found != known:
                            yield found
                        known = found
            except ExpiredError as error:
                self._version = ""
                log.debug("changes of the workers missed: listing them", reason=str(error))
            except (ApiError, UnusableSliceError) as error:
                self._version = ""
                self._failures.failed(error)
            await self._rest()

    async def _changes(self, api: SlicesApi) -> AsyncGenerator[None, None]:
        """Keep `_slices` current; yield when they may have changed. Never ends by itself."""
        while True:
            if not self._version:
                self._slices, self._version = await api.list()
                if not self._slices:
                    log.info("no EndpointSlices of the service yet", service=self._name)
                yield
            began = time.monotonic()
            async with api.watch(self._version) as events:
                self._failures.over()
                async for event in events:
                    self._version = event.version
                    self._pause_s = self._first_pause_s
                    self._apply(event.kind, event.slice)
                    yield
            if time.monotonic() - began > _LONG_WATCH_S:
                self._pause_s = self._first_pause_s
            await self._rest()

    def _apply(self, kind: str, changed: Slice) -> None:
        name = changed["metadata"].get("name", "")
        if kind in ("ADDED", "MODIFIED"):
            self._slices[name] = changed
        elif kind == "DELETED":
            self._slices.pop(name, None)

    async def _rest(self) -> None:
        await pause(self._pause_s)
        self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)
