"""A simulated network between nodes: connections that keep order, latencies, and their faults.

Bytes of one connection arrive in order, those of different connections in any. What a fault does to
a connection is what TCP and gRPC make of it: a reset is seen at once, a silent loss only when
keepalive has missed its answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from tests.support.simulation.sockets import Listener, Transport

KEEPALIVE_S = 20.0
"""A connection on which nothing arrives is given up after so long."""
_WINDOW_BYTES = 64 << 10
_USUAL_S = (0.0001, 0.002)
_SPIKE, _SPIKE_S = 0.01, 0.05

NODE: contextvars.ContextVar[str] = contextvars.ContextVar("simulated_node", default="outside")
"""Whose task runs."""


class BrokenError(Exception):
    """The connection has ended."""


class Network:
    """All nodes' connections. A pair of nodes can be cut, a node frozen."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.loop: asyncio.AbstractEventLoop
        self._links: list[Link] = []
        self._listening: dict[tuple[str, int], Listener] = {}
        self._cut: set[frozenset[str]] = set()
        self._mute: set[tuple[str, str]] = set()
        self.skews_s: dict[str, float] = {}
        """By how much a node's wall clock is wrong."""
        self._frozen: set[str] = set()
        self.slowness = 1.0
        self.broken: list[str] = []
        """What no server may do on a connection, and one did."""

    # ---- faults

    def latency_s(self) -> float:
        usual = self.chance.uniform(*_USUAL_S) * self.slowness
        spike = self.chance.random() < _SPIKE
        return usual + (self.chance.uniform(0, _SPIKE_S) if spike else 0.0)

    def cut(self, one: str, other: str) -> None:
        """Lose what these two send each other; connections last until keepalive gives them up."""
        self._cut.add(frozenset((one, other)))
        self._blocked_changed()

    def heal(self, one: str, other: str) -> None:
        """End a cut; what was lost is sent again, as TCP does, where the connection still is."""
        self._cut.discard(frozenset((one, other)))
        self._blocked_changed()

    def mute(self, source: str, target: str) -> None:
        """Lose what one node sends another, and not the reverse, until `unmute`: half-open."""
        self._mute.add((source, target))
        self._blocked_changed()

    def unmute(self, source: str, target: str) -> None:
        self._mute.discard((source, target))
        self._blocked_changed()

    def freeze(self, node: str) -> None:
        """Keep what a node sends and is sent until `thaw`; its keepalive still answers."""
        self._frozen.add(node)
        self._blocked_changed()

    def thaw(self, node: str) -> None:
        self._frozen.discard(node)
        self._blocked_changed()

    def reset(self, one: str, other: str) -> None:
        """Break the connections of two nodes, at once."""
        for link in list(self._links):
            if {link.client, link.server} == {one, other}:
                link.break_()

    def end(self, node: str, *, silently: bool) -> None:
        """End a node's connections: a reset for its peers, or ``silently`` nothing at all."""
        for address in [at for at in self._listening if at[0] == node]:
            del self._listening[address]
        for link in list(self._links):
            if node in (link.client, link.server):
                link.lose(node, silently=silently)

    def is_mute(self, source: str, target: str) -> bool:
        return (source, target) in self._mute

    def is_cut(self, one: str, other: str) -> bool:
        """Whether something that one of two nodes sends the other is lost."""
        pair = one, other
        return frozenset(pair) in self._cut or pair in self._mute or pair[::-1] in self._mute

    def blocked(self, one: str, other: str) -> bool:
        lost = frozenset((one, other)) in self._cut
        return lost or one in self._frozen or other in self._frozen

    def _blocked_changed(self) -> None:
        for link in list(self._links):
            link.blocked_changed()

    def add(self, link: Link) -> None:
        self._links.append(link)

    def remove(self, link: Link) -> None:
        if link in self._links:
            self._links.remove(link)

    # ---- TCP, for engines' hand-offs

    def listen(self, make: Any, host: str, port: int) -> Listener:
        listener = self._listening[(host, port)] = Listener(self, make, host, port)
        return listener

    def forget(self, listener: Listener) -> None:
        if self._listening.get((listener.host, listener.port)) is listener:
            del self._listening[(listener.host, listener.port)]

    async def dial(self, make: Any, host: str, port: int) -> tuple[Any, Any]:
        await asyncio.sleep(self.latency_s())
        while self.blocked(NODE.get(), host):
            await asyncio.sleep(1.0)  # as TCP sends its first packet again
        listener = self._listening.get((host, port))
        if listener is None:
            message = f"{host}:{port} refuses connections"
            raise ConnectionRefusedError(message)
        link = Link(self, NODE.get(), host)
        here, there = make(), listener.make()
        near, far = Transport(link.to_server, here), Transport(link.to_client, there)

        def broke() -> None:
            near.broken()
            far.broken()

        link.on_break = broke
        near.reads(link.to_client)
        listener.context.run(far.reads, link.to_server)
        here.connection_made(near)
        listener.context.run(there.connection_made, far)
        return near, here


class Direction:
    """One way of one connection: what was sent arrives in order."""

    def __init__(self, link: Link, source: str, target: str) -> None:
        self.link = link
        self._ends = source, target
        self.deliver: Callable[[Any], None] = lambda _: None
        """Of a socket: takes what arrives."""
        self._under_way: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._last_s = 0.0
        self._lost = False

    def send(self, deliver: Callable[[Any], None], item: Any) -> None:
        """Call ``deliver`` with ``item`` when it arrives."""
        if not (self.link.over or self._lost):
            self._under_way.append((deliver, item))
            self._schedule()

    def _schedule(self) -> None:
        network = self.link.network
        self._last_s = max(self._last_s, network.loop.time() + network.latency_s())
        network.loop.call_at(self._last_s, self._arrive)

    def _arrive(self) -> None:
        """Deliver the next one; while the nodes are blocked all wait for `go_on`."""
        link = self.link
        if self._under_way and not (link.over or link.blocked or link.network.is_mute(*self._ends)):
            deliver, item = self._under_way.popleft()
            deliver(item)

    def go_on(self) -> None:
        for _ in self._under_way:
            self._schedule()

    def lose(self) -> None:
        """Lose all that is sent from now on."""
        self._lost = True


class Link:
    """One connection between a client's and a server's node."""

    def __init__(self, network: Network, client: str, server: str) -> None:
        self.network = network
        self.client, self.server = client, server
        self.to_server = Direction(self, client, server)
        self.to_client = Direction(self, server, client)
        self.over = False
        self.on_break: Callable[[], Any] = lambda: None
        self._given_up: asyncio.TimerHandle | None = None
        network.add(self)

    @property
    def blocked(self) -> bool:
        return self.network.blocked(self.client, self.server)

    def blocked_changed(self) -> None:
        cut = self.network.is_cut(self.client, self.server)
        if cut and self._given_up is None:
            self._given_up = self.network.loop.call_later(KEEPALIVE_S, self.break_)
        elif not cut and self._given_up is not None:
            self._given_up.cancel()
            self._given_up = None
        if not self.blocked:
            self.to_server.go_on()
            self.to_client.go_on()

    def lose(self, node: str, *, silently: bool) -> None:
        """End it as the end of one of its nodes does: what that one had sent may still arrive."""
        peers = self.to_client if node == self.server else self.to_server
        if silently:
            self.to_server.lose()
            self.to_client.lose()
            self.network.loop.call_later(KEEPALIVE_S, self.break_)
        else:
            peers.send(lambda _: self.break_(), None)

    def break_(self) -> None:
        if self.over:
            return
        self.over = True
        if self._given_up is not None:
            self._given_up.cancel()
        self.network.remove(self)
        self.on_break()


class Pipe:
    """Messages of one RPC in one direction; it takes a bounded number of bytes."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._came: deque[Any] = deque()
        self._bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._error: BaseException | None = None

    @property
    def link(self) -> Link:
        return self._direction.link

    async def put(self, data: bytes) -> None:
        """Send a message.

        Raises:
            BrokenError: the RPC has ended.
        """
        while self._bytes > _WINDOW_BYTES and self._error is None:
            self._room.clear()
            await self._room.wait()
        if self._error is not None:
            raise BrokenError
        self._bytes += len(data)
        self._direction.send(self._arrived, data)

    def tell(self, item: Any) -> None:
        """Send without waiting: a status, the end, a lone message."""
        self._direction.send(self._arrived, item)

    def _arrived(self, item: Any) -> None:
        self._came.append(item)
        self._changed.set()

    @property
    def filled(self) -> bool:
        return bool(self._came)

    async def get(self) -> Any:
        """Wait for the next thing.

        Raises:
            BrokenError: the connection ended before.
        """
        while not self._came:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()
        item = self._came.popleft()
        if isinstance(item, bytes):
            self._bytes -= len(item)
            if self._bytes <= _WINDOW_BYTES:
                self._room.set()
        return item

    def fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
            self._changed.set()
            self._room.set()
