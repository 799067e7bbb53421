"""All workers that are found, each with its watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from millstream_server.cli.client import connect
from millstream_server.cli.connection import Destination
from millstream_server.cli.top.conditions import follow_conditions
from millstream_server.cli.top.state import WorkerState
from millstream_server.cli.top.watch import WorkerWatch
from millstream_server.routing.discovery.sources import Addresses, Discovery

_SHOWN_AFTER_S = 60.0
"""How long a worker that discovery no longer names is shown."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a worker before it is called."""

    name: str = ""
    admin: str = ""
    """Its admin address."""
    admin_key: str = field(default="", repr=False)
    """What that asks for."""


class Workers:
    """Follows the workers that discovery names; `close` it."""

    def __init__(
        self,
        discovery: Discovery,
        server: Destination,
        interval_s: float,
        known: Mapping[str, Known],
    ) -> None:
        """Connect to each worker as to ``server``; ``known`` is by address."""
        self._discovery = discovery
        self._server = server
        self._interval_s = interval_s
        self._known = known
        self._states: dict[str, WorkerState] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._found = False
        self._finding = asyncio.ensure_future(self._find())

    def states(self) -> list[WorkerState]:
        """Return what is known of each worker now.

        Raises:
            ValueError: an address that was found can't be called.
        """
        for task in (self._finding, *self._watches.values()):
            if task.done() and not task.cancelled():
                task.result()
        old = time.monotonic() - _SHOWN_AFTER_S
        for address, state in list(self._states.items()):
            if not state.listed and state.since_s < old:
                del self._states[address]
        return list(self._states.values())

    @property
    def settled(self) -> bool:
        """Whether all have told what they can tell soon."""
        return self._found and all(state.settled for state in self._states.values())

    async def close(self) -> None:
        """Disconnect from all."""
        tasks = [self._finding, *self._watches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find(self) -> None:
        async for addresses in self._discovery.watch():
            self._apply(addresses)
            self._found = True

    def _apply(self, addresses: Addresses) -> None:
        for address in addresses - self._watches.keys():
            known = self._known.get(address, Known())
            state = WorkerState(address, known.name, since_s=time.monotonic())
            self._states[address] = state
            self._watches[address] = asyncio.ensure_future(self._follow(state, known))
        for address in self._watches.keys() - addresses:
            self._watches.pop(address).cancel()
            self._states[address].listed = False
            self._states[address].since_s = time.monotonic()

    async def _follow(self, state: WorkerState, known: Known) -> None:
        server = replace(self._server, address=state.address)
        watch = WorkerWatch(state, server, connect(server), self._interval_s)
        works = [watch.run()]
        if known.admin:
            admin = connect(replace(self._server, address=known.admin, api_key=known.admin_key))
            works.append(follow_conditions(state, admin, self._interval_s))
        await asyncio.gather(*works)
