"""One rank's batches from two sockets: those that are published, and those it replays.

Both are read on the event loop, without blocking it. A batch costs the loop about 0.1 ms, and
0.12 us per block; a request has two of them, however many tokens it gets.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import zmq

from millstream_server.engines.kv_feed import LIMITS
from millstream_server.engines.kv_translation import BlockTranslation, UnreadableBatchError
from millstream_server.kv_cache.events import KvEvent
from millstream_server.runtime.telemetry.log import get_log

MOST_HELD = 2_000


class BatchOrder:
    """Batches come doubled, late or not at all; those in order are returned, each once."""

    def __init__(self, most_held: int = MOST_HELD) -> None:
        """Expect number 0; hold at most ``most_held`` batches that wait for an earlier one."""
        self.next = 0
        """The number that is expected."""
        self._held: dict[int, bytes] = {}
        self._most_held = most_held

    @property
    def incomplete(self) -> bool:
        return bool(self._held)

    @property
    def full(self) -> bool:
        """Whether too many are held, so that the earlier one has to be given up."""
        return len(self._held) > self._most_held

    def take(self, number: int, payload: bytes) -> list[bytes]:
        """Take a batch; return those that are in order now."""
        if number >= self.next:
            self._held.setdefault(number, payload)
        return self._in_order()

    def give_up(self) -> list[bytes]:
        """Go on with the first batch that is held; return those that are in order then."""
        if self._held:
            self.next = min(self._held)
        return self._in_order()

    def _in_order(self) -> list[bytes]:
        ready = []
        while (payload := self._held.pop(self.next, None)) is not None:
            ready.append(payload)
            self.next += 1
        return ready


log = get_log(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_AT_ONCE = 50
"""Batches read before other work of the loop has its turn."""
_REPLAY_TIMEOUT_S = 5.0
_TRIES = 2

Tell = Callable[[list[KvEvent]], None]


class Inlet:
    """A socket whose messages are passed on as they come."""

    def __init__(
        self, zmq_socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]
    ) -> None:
        """Read ``zmq_socket`` from now on; `close` closes it."""
        self._socket = zmq_socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(zmq_socket.getsockopt(zmq.FD))
        self._later: asyncio.Handle | None = None
        self._loop.add_reader(self._descriptor, self._read)
        self.look()

    def send(self, message: list[bytes]) -> None:
        """Send a message; dropped if the queue is full."""
        try:
            self._socket.send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a request for KV events could not be sent")
        self.look()

    def look(self) -> None:
        """Look for messages soon: the descriptor tells only of those that came after a look."""
        if self._later is None:
            self._later = self._loop.call_soon(self._read)

    def _read(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None
        for _ in range(_AT_ONCE):
            try:
                message = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(message)
            if self._socket.closed:
                return
        self.look()

    def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._descriptor)
        self._socket.close(linger=0)


class RankReader:
    """Reads one rank: puts its batches in order, has lost ones replayed, translates them.

    What can't be replayed is lost: then the cache is told to be empty, and what comes after that
    is told as usual.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        bound: str,
        replay: str,
        tell: Tell,
        translation: BlockTranslation[Any],
        *,
        binds: bool = True,
    ) -> None:
        """Bind ``bound``, or connect to it. ``replay`` is where the rank replays; empty: nowhere.

        Raises:
            zmq.ZMQError: it can't be bound.
        """
        self._context = context
        self._replay_endpoint = replay
        self._tell = tell
        self._order = BatchOrder()
        self._translation = translation
        self._replay: Inlet | None = None
        self._asked = 0
        """The first number of the replay that is under way."""
        self._tries = 0
        self._timeout: asyncio.TimerHandle | None = None
        events = context.socket(zmq.SUB)
        events.setsockopt(zmq.RCVHWM, LIMITS["hwm"])
        events.setsockopt(zmq.IPV6, "[" in bound)
        events.setsockopt(zmq.SUBSCRIBE, b"")
        try:
            events.bind(bound) if binds else events.connect(bound)
        except zmq.ZMQError:
            events.close(linger=0)
            raise
        self._events = Inlet(events, self._published)

    def catch_up(self) -> None:
        """Ask for what was published before the rank had reached this socket."""
        if self._replay_endpoint and self._replay is None:
            self._ask()

    def flushed(self) -> None:
        """Tell that the cache is empty, before the rank does."""
        self._tell([self._translation.cleared()])

    def adapter_unloaded(self, adapter: str) -> None:
        """Tell that an adapter's blocks are of no use any more."""
        if events := self._translation.without(adapter):
            self._tell(events)

    def _published(self, message: list[bytes]) -> None:
        if len(message) == 3 and len(message[1]) == 8:  # noqa: PLR2004 - topic, number, batch
            self._take(int.from_bytes(message[1], "big"), message[2])

    def _take(self, number: int, payload: bytes) -> None:
        self._apply(self._order.take(number, payload))
        if self._order.full:
            self._lose()
        if self._order.incomplete and self._replay is None:
            self._recover()

    def _apply(self, payloads: list[bytes]) -> None:
        events: list[KvEvent] = []
        for payload in payloads:
            try:
                events += self._translation.batch(payload)
            except UnreadableBatchError as error:
                log.warning("a batch of KV events can't be read", error=error)
                events.append(self._translation.cleared())
        if events:
            self._tell(events)

    # -- replay --

    def _recover(self) -> None:
        """Get what is missing before the batches that are held."""
        if self._replay_endpoint:
            self._tries = 0
            self._ask()
            return
        while self._order.incomplete:
            self._lose()

    def _ask(self) -> None:
        self._end_replay()
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.RCVHWM, LIMITS["hwm"])
        dealer.connect(self._replay_endpoint)
        self._replay = Inlet(dealer, self._replayed)
        self._asked = self._order.next
        self._tries += 1
        loop = asyncio.get_running_loop()
        self._timeout = loop.call_later(_REPLAY_TIMEOUT_S, self._replay_ended)
        self._replay.send([b"", self._asked.to_bytes(8, "big")])

    def _replayed(self, message: list[bytes]) -> None:
        if len(message) != 4:  # noqa: PLR2004 - nothing, topic, number, batch
            return
        if message[2] == _END:
            self._tries = _TRIES
            self._replay_ended()
        else:
            self._take(int.from_bytes(message[2], "big"), message[3])

    def _replay_ended(self) -> None:
        """Look at what a replay brought, at its end or when that doesn't come."""
        self._end_replay()
        if not self._order.incomplete:
            return
        if self._order.next > self._asked or self._tries < _TRIES:
            self._ask()
            return
        self._lose()
        if self._order.incomplete:
            self._recover()

    def _end_replay(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
        if self._replay is not None:
            self._replay.close()
            self._replay = None

    def _lose(self) -> None:
        """Go on without the batches that are missing."""
        log.warning("KV events are lost", first=self._order.next)
        self._tell([self._translation.cleared()])
        self._apply(self._order.give_up())

    def close(self) -> None:
        self._end_replay()
        self._events.close()
