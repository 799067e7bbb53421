"""The workers behind a Kubernetes service, by its EndpointSlices."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from millstream_server.routing.discovery.base import Addresses, Failures, pause
from millstream_server.routing.discovery.kubernetes_api import (
    ApiError,
    ClusterAccess,
    ExpiredError,
    SlicesApi,
)
from millstream_server.routing.discovery.slices import (
    Slice,
    UnusableSliceError,
    addresses_of,
)
from millstream_server.runtime.telemetry.log import get_log

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
        self._failures = Failures(log, "workers not read from Kubernetes", service=self._name)

    async def watch(self) -> AsyncIterator[Addresses]:
        """See `Discovery.watch`."""
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
