"""What goes wrong in a simulated run, and what operators do in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from millstream_server.control.engine import Role

if TYPE_CHECKING:
    from tests.support.simulation.suite import Fault, Suite

LIE = 7
"""What an engine that lies adds to each token."""
_SLOW = 30.0
_JUMPS_S = (25.0, -25.0, 100.0, -100.0)
"""Tickets allow for a difference of a minute."""
_TOLD_S = 0.5
"""A worker whose engine has died tells its callers before it ends."""
_PATIENCE = 10.0
_DRAIN_S = 60.0
_ROLLOUT_S = 10.0
"""The chart's minReadySeconds and preStopSeconds."""


class Faults:
    """Plays faults; each is over when its call returns, and what it broke runs again."""

    def __init__(self, suite: Suite) -> None:
        self._suite = suite

    async def play(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at_s)
        await getattr(self, fault.kind)(fault)

    def _index(self, fault: Fault) -> int:
        return fault.target % len(self._suite.scenario.workers)

    def _front(self, fault: Fault) -> str:
        """Return the name of a Processor."""
        return self._suite.front_name(fault.target // 7 % self._suite.scenario.processors)

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

    async def die(self, fault: Fault) -> None:
        """End a worker's engine: its requests fail, and the worker ends, too."""
        worker = self._suite.worker(self._index(fault))
        if worker is not None:
            worker.engine.die()
            await asyncio.sleep(_TOLD_S)
            await self.kill(fault)

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

    async def lie(self, fault: Fault) -> None:
        """Let an engine draw other tokens for a while, where logprobs are asked for."""
        worker = self._suite.worker(self._index(fault))
        if worker is not None:
            worker.engine.lies = LIE
            await asyncio.sleep(fault.lasts_s)
            worker.engine.lies = 0

    async def drain(self, fault: Fault) -> None:
        """Restart a worker as an operator does: it drains, ends and comes back."""
        index = self._index(fault)
        worker = self._suite.worker(index)
        if worker is None or worker.draining:
            return
        await worker.drain(fault.lasts_s * _PATIENCE)
        if self._suite.worker(index) is worker:
            await self._suite.end(index, silently=False)
            self._suite.start(index)

    async def roll(self, fault: Fault) -> None:
        """Replace a worker as a Deployment does, with a DNS whose answers are ``lasts_s`` old."""
        index = self._index(fault)
        old = self._suite.worker(index)
        assert old is not None
        name = self._suite.replace(index)
        await asyncio.sleep(_ROLLOUT_S)
        draining = asyncio.ensure_future(old.drain(_DRAIN_S))
        await asyncio.sleep(fault.lasts_s - _ROLLOUT_S)
        self._suite.announce()
        await draining
        await self._suite.end_worker(name, silently=False)

    # ---- Processors

    async def kill_front(self, fault: Fault, *, silently: bool = False) -> None:
        """End a Processor's process; another one takes its place."""
        name = self._front(fault)
        await self._suite.end_front(name, silently=silently)
        await asyncio.sleep(fault.lasts_s)
        if self._suite.front(name) is None:
            self._suite.start_front(name)

    async def vanish_front(self, fault: Fault) -> None:
        """End a Processor's machine: nobody is told."""
        await self.kill_front(fault, silently=True)

    async def drain_front(self, fault: Fault) -> None:
        """Restart a Processor as an operator does."""
        name = self._front(fault)
        front = self._suite.front(name)
        if front is None or front.draining:
            return
        await front.drain(_DRAIN_S)
        if self._suite.front(name) is front:
            await self._suite.end_front(name, silently=False)
            self._suite.start_front(name)

    # ---- the network

    async def cut(self, fault: Fault) -> None:
        """Lose what a Processor and a worker send each other, for a while."""
        await self._cut(self._front(fault), self._suite.name(self._index(fault)), fault.lasts_s)

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

    async def mute(self, fault: Fault) -> None:
        """Lose what one side of a connection sends, for a while: it is half-open."""
        ends = self._front(fault), self._suite.name(self._index(fault))
        source, target = ends if fault.target % 2 else ends[::-1]
        self._suite.network.mute(source, target)
        await asyncio.sleep(fault.lasts_s)
        self._suite.network.unmute(source, target)

    async def reset(self, fault: Fault) -> None:
        """Break the connections of a Processor and a worker; both live on."""
        self._suite.network.reset(self._front(fault), self._suite.name(self._index(fault)))

    async def slow(self, fault: Fault) -> None:
        """Let everything take thirty times as long on its way."""
        self._suite.network.slowness = _SLOW
        await asyncio.sleep(fault.lasts_s)
        self._suite.network.slowness = 1.0

    # ---- clocks

    async def jump(self, fault: Fault) -> None:
        """Let a machine's wall clock be wrong for a while."""
        name = self._suite.name(self._index(fault)) if fault.target % 3 else self._front(fault)
        self._suite.network.skews_s[name] = _JUMPS_S[fault.target % len(_JUMPS_S)]
        await asyncio.sleep(fault.lasts_s)
        self._suite.network.skews_s.pop(name, None)

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
        Faults.die,
        Faults.freeze,
        Faults.wedge,
        Faults.lie,
        Faults.drain,
        Faults.kill_front,
        Faults.vanish_front,
        Faults.drain_front,
        Faults.cut,
        Faults.cut_peers,
        Faults.mute,
        Faults.reset,
        Faults.slow,
        Faults.jump,
        Faults.lose_address,
    )
}
