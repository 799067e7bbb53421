"""What goes wrong in a simulated run, and what operators do in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from millstream_server.control.engine import Role

if TYPE_CHECKING:
    from tests.support.simulation.suite import Fault, Suite

_SLOW = 30.0


class Faults:
    """Plays faults; each is over when its call returns, and what it broke runs again."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite

    async def play(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        await KINDS[fault.kind](self, fault)

    def _index(self, fault: Fault) -> int:
        return fault.target % len(self._suite.scenario.workers)

    # ---- workers

    async def kill(self, fault: Fault, *, silently: bool = False) -> None:
        """End a worker's process; another one takes its place."""
        index = self._index(fault)
        await self._suite.end(index, silently=silently)
        await asyncio.sleep(fault.lasts_s)
        if self._suite.worker(index) is None:
            self._suite.start(index)

    async def vanish(self, fault: Fault) -> None:
        """End a worker's machine: nobody is told."""
        await self.kill(fault, silently=True)

    async def freeze(self, fault: Fault) -> None:
        """Stop a worker for a while, as SIGSTOP does."""
        name = self._suite.name(self._index(fault))
        self._suite.network.freeze(name)
        await asyncio.sleep(fault.lasts_s)
        self._suite.network.thaw(name)

    async def wedge(self, fault: Fault) -> None:
        """Let an engine hang for a while: it takes requests and makes no tokens."""
        worker = self._suite.worker(self._index(fault))
        if worker is not None:
            worker.engine.wedge()
            await asyncio.sleep(fault.lasts_s)
            worker.engine.unwedge()

    async def drain(self, fault: Fault) -> None:
        """Restart a worker as an operator does: it drains, ends and comes back."""
        index = self._index(fault)
        worker = self._suite.worker(index)
        if worker is None or worker.draining:
            return
        await worker.drain(60.0)
        if self._suite.worker(index) is worker:
            await self._suite.end(index, silently=False)
            self._suite.start(index)

    # ---- the network

    async def cut(self, fault: Fault) -> None:
        """Lose what the Processor and a worker send each other, for a while."""
        await self._cut("processor", self._suite.name(self._index(fault)), fault.lasts_s)

    async def cut_peers(self, fault: Fault) -> None:
        """Lose what a prefill and a decode worker send each other, for a while."""
        roles = list(enumerate(self._suite.scenario.workers))
        prefill = [index for index, role in roles if role is Role.PREFILL]
        decode = [index for index, role in roles if role is Role.DECODE]
        if prefill and decode:
            one = self._suite.name(prefill[fault.target % len(prefill)])
            other = self._suite.name(decode[fault.target // 7 % len(decode)])
            await self._cut(one, other, fault.lasts_s)

    async def _cut(self, one: str, other: str, lasts_s: float) -> None:
        self._suite.network.cut(one, other)
        await asyncio.sleep(lasts_s)
        self._suite.network.heal(one, other)

    async def reset(self, fault: Fault) -> None:
        """Break the connections of the Processor and a worker; both live on."""
        self._suite.network.reset("processor", self._suite.name(self._index(fault)))

    async def slow(self, fault: Fault) -> None:
        """Let everything take thirty times as long on its way."""
        self._suite.network.slowness = _SLOW
        await asyncio.sleep(fault.lasts_s)
        self._suite.network.slowness = 1.0

    # ---- discovery

    async def lose_address(self, fault: Fault) -> None:
        """Let discovery name a worker no more for a while; it lives on."""
        self._suite.announce(self._suite.name(self._index(fault)))
        await asyncio.sleep(fault.lasts_s)
        self._suite.announce()


KINDS: dict[str, Callable[[Faults, Fault], Awaitable[None]]] = {
    kind.__name__: kind
    for kind in (
        Faults.kill,
        Faults.vanish,
        Faults.freeze,
        Faults.wedge,
        Faults.drain,
        Faults.cut,
        Faults.cut_peers,
        Faults.reset,
        Faults.slow,
        Faults.lose_address,
    )
}
