"""How connections' frames are taken: in slices of time, with pauses, so that nobody waits.

`WorkShare` divides the event loop's time among a server's callers, `Work` counts what the
connections of one take, and `Intake` passes a connection's bytes on in slices.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any

from millstream_server.runtime.transport.sockets import peer_has_closed

TURN_S = 0.002
"""Of one turn of the loop, for the bytes of all connections together; the rest waits for the next.
What the loop does for others waits for a few such turns, however many connections have much to
say."""
_SAVED_S = 0.1
"""Most time that a caller saves up: some 150 requests at once are served without a pause."""
_FIRST_S = 0.02
"""What a new caller has, some 30 requests."""
_KEPT_S = 10.0
"""So long a caller without connections is known: else it would get more by connecting anew. After
this it has saved up all, and all its resets are forgiven."""
STREAM_S = 0.0002
"""What a stream costs besides its frames, whatever its handler does."""
REQUEST_S = 0.001
"""What its first message costs besides: a turn of a chat begins with it."""
MESSAGE_S = 0.00005
"""What each other message costs."""
_BEGUN_PART = 0.4
"""What requests that have begun really take of that, with a small prompt; so a caller beside others
begins some 900 a second. Turns of the loop count all of it."""
_LEAST = 0.02
"""Of the loop's time, for any caller: twenty requests a second are held up by no number of
others. Those are held up by the turns."""
_MOST_S = 0.05
"""What a slice counts for at most, more than any frame takes: a garbage collection meanwhile is
nobody's fault."""
_SHORT_S = 0.004
"""Nearly all pieces of work take less; they count whole, whoever else used the machine then."""
_NEIGHBOUR_S = 1.0
"""So long after others were served, callers that take much are held back for them."""
_YIELD_S = 0.0003
"""A read that takes longer is the connection's last in this turn of the loop: uvloop would read up
to 32 times from one socket before it looks at others."""
_SLICE_S = 0.0001
"""Who is let go on may take so long, however little is left of the turn: at least one frame."""
_NEW_S = 0.0014
"""A connection is new until its frames have taken so long: enough for the preface, settings and the
first request, which else would wait for all that stay silent. A new one gets the shortest slices:
of a burst of hundreds each comes to its first request soon."""
_COUNTED_S = 0.0005
"""Most of one slice that counts against `_NEW_S`: by the clock a slice takes longer when other
processes use the machine."""


class _Waiting:
    """Connections that wait: of each caller in turn, and of one in the order in which they came.

    A caller with thousands of connections holds up its own.
    """

    __slots__ = ("_by_caller",)

    def __init__(self) -> None:
        self._by_caller: dict[Hashable, deque[Intake]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_caller)

    def add(self, connection: Intake) -> None:
        self._by_caller.setdefault(connection.caller_key, deque()).append(connection)

    def take(self) -> Intake:
        key = next(iter(self._by_caller))
        own = self._by_caller.pop(key)
        connection = own.popleft()
        if own:
            self._by_caller[key] = own  # at the end
        return connection


class WorkShare:
    """What a server's callers share of the loop's time; one per server."""

    def __init__(
        self, of_loop: float = 0.5, max_resets: float = 1024, resets_per_s: float = 102.4
    ) -> None:
        """Give all callers above their share together this part of the loop's time.

        Each may reset so many requests at once, and so many a second.
        """
        self.of_loop = of_loop
        self.resets = max_resets, resets_per_s
        self.above = 0
        """How many callers take more than their share."""
        self._within: Work | None = None
        """The caller within its share that was served last."""
        self._within_s = self._other_s = -_NEIGHBOUR_S
        """When; and when another one than it was."""
        self._works: dict[Hashable, Work] = {}
        """By caller."""
        self.turn_s = TURN_S
        """What is left of this turn of the loop."""
        self._cpu_s = time.thread_time()
        """The thread's CPU time when it was read last."""
        self._first, self._new, self._last = _Waiting(), _Waiting(), _Waiting()
        self._next_turn: asyncio.Handle | None = None

    def cpu_s(self, took_s: float) -> float:
        """Return about how much CPU time was used in the ``took_s`` that have just passed.

        What other processes take of the machine is no caller's fault. Reading the thread's CPU time
        is a system call, which may cost more than a request's frames. So it is read only after
        long pieces: one counts for no more than was used since it was read last.
        """
        if took_s < _SHORT_S:
            return took_s
        last_s, self._cpu_s = self._cpu_s, time.thread_time()
        return min(took_s, self._cpu_s - last_s)

    def served(self, work: Work, now_s: float) -> None:
        """Note that a caller within its share was served."""
        if work is not self._within:
            self._within, self._other_s = work, self._within_s
        self._within_s = now_s

    def neighbour_s(self, work: Work) -> float:
        """Return when another caller within its share was served last."""
        return self._other_s if work is self._within else self._within_s

    def of(self, caller_key: Hashable, now_s: float) -> Work:
        """Return what a caller's connections take together; each calls `Work.close` once."""
        work = self._works.get(caller_key)
        if work is None:
            work = self._works[caller_key] = Work(self, now_s)
        work.connections += 1
        return work

    def forget(self, now_s: float) -> None:
        """Forget who has had no connections for long; called about once a second."""
        gone = [key for key, work in self._works.items() if work.is_gone(now_s)]
        for key in gone:
            del self._works[key]

    def wait(self, connection: Intake) -> None:
        late = self._new if connection.new else self._last
        (late if connection.last else self._first).add(connection)
        self._expect_turn()

    def used(self, seconds: float) -> None:
        self.turn_s -= seconds
        self._expect_turn()

    def _expect_turn(self) -> None:
        if self._next_turn is None:
            self._next_turn = asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        """Begin the next turn: those that wait go on while there is time.

        In every turn one of each kind does, so that none waits for ever: those that bring messages
        first, then those that are new; in each kind callers by turns.
        """
        self._next_turn = None
        self.turn_s = TURN_S
        for queue in (self._first, self._new, self._last):
            if queue:
                queue.take().go_on()
            while queue and self.turn_s > 0:
                queue.take().go_on()
        if self._first or self._new or self._last:
            self._expect_turn()


class Work:
    """Time that one caller's frames have taken, on all its connections; times are the event loop's.

    HTTP/2 lets a caller send frames that cost the server far more than the caller: requests that
    are reset at once, settings, pings. Whatever they are, the time is counted, and the caller's
    connections are read later when it has used up its share and others are there: callers that
    behave notice nothing, and the only caller gets all.
    """

    __slots__ = ("_above", "_at_s", "_left_s", "connections", "resets", "share")

    def __init__(self, share: WorkShare, now_s: float) -> None:
        self.share = share
        self.connections = 0
        self.resets = RateLimit(*share.resets, now_s)
        self._left_s = _FIRST_S
        self._at_s = now_s
        self._above = False

    def took(self, seconds: float, begun_s: float, now_s: float) -> float:
        """Count work that was done, and work that has begun and takes about ``begun_s``.

        Return how long to read nothing from the connection that did it, mostly 0.
        """
        rate = max(_LEAST, self.share.of_loop / max(1, self.share.above))
        self._left_s = min(_SAVED_S, self._left_s + (now_s - self._at_s) * rate)
        self._left_s -= min(seconds, _MOST_S) + _BEGUN_PART * begun_s
        self._at_s = now_s
        self._set_above(self._left_s < 0)
        if not self._above:
            self.share.served(self, now_s)
            return 0.0
        if now_s - self.share.neighbour_s(self) > _NEIGHBOUR_S:
            self._left_s = 0.0
            return 0.0
        return -self._left_s / rate

    def close(self) -> None:
        """Note that a connection has ended."""
        self.connections -= 1
        if self.connections <= 0:
            self._set_above(False)  # noqa: FBT003

    def is_gone(self, now_s: float) -> bool:
        return self.connections <= 0 and now_s - self._at_s > _KEPT_S

    def _set_above(self, above: bool) -> None:  # noqa: FBT001
        if above is not self._above:
            self._above = above
            self.share.above += 1 if above else -1


class Intake:
    """Passes frames on. 1 KiB may hold dozens of requests, so a turn of the loop stays short.

    Where connections must wait, those go first whose RPCs bring their messages.
    """

    __slots__ = ("_backlog", "_ends_at_fin", "_goes_last", "_handle", "_loop", "_paused", "_share",
                 "_socket", "_start", "_stopped", "_took_s", "_unread", "caller_key",
                 "work")  # fmt: skip

    work: Work
    """Its caller's; `open` sets it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        share: WorkShare,
        handle: Callable[[bytes], bool],
        start: Callable[[], float],
        goes_last: Callable[[], bool],
    ) -> None:
        """Pass bytes to ``handle``, which reads one frame and returns whether there was one.

        ``start`` is called after a slice's last frame; it returns the time, in seconds, that its
        requests are about to take. ``goes_last`` tells `WorkShare` whether others go first.
        """
        self._loop = loop
        self._share = share
        self._handle = handle
        self._start = start
        self._goes_last = goes_last
        self._socket: Any = None
        self.caller_key: Hashable = ""
        self._unread = b""
        """Bytes that wait for their turn; there may be frames before them."""
        self._backlog = False
        """There are such frames, or more has come during a pause."""
        self._paused = False
        """It waits: reading is paused."""
        self._stopped = False
        self._took_s = 0.0
        """What its frames, and the requests in them, have taken so far."""

    def open(self, transport: Any, caller_key: Hashable, *, ends_at_fin: bool = False) -> None:
        """Take the bytes of ``transport``; ``ends_at_fin``: what is before a FIN is void."""
        self._socket, self.caller_key = transport, caller_key
        self.work = self._share.of(caller_key, self._loop.time())
        self._ends_at_fin = ends_at_fin

    def stop(self) -> None:
        """Take nothing more, and forget the connection: without a cycle its memory is free now."""
        if self._stopped:
            return
        self._stopped = True
        self._handle, self._start, self._goes_last = _drop, float, bool
        self._unread = b""
        if self._socket is not None:
            self.work.close()

    @property
    def waits(self) -> bool:
        return self._paused

    @property
    def last(self) -> bool:
        """Whether others go first."""
        return self._goes_last()

    @property
    def new(self) -> bool:
        """Whether it has hardly begun: then it waits for other new ones only."""
        return self._took_s < _NEW_S

    def take(self, data: bytes) -> None:
        if self._stopped:
            return
        if self._paused or self._share.turn_s <= 0:
            self._unread += data
            self._wait()
        else:
            self._pass_on(data, self._share.turn_s)

    def go_on(self) -> None:
        if self._stopped:
            return
        if self._ends_at_fin and (self._unread or self._backlog) and peer_has_closed(self._socket):
            self._socket.abort()  # else all that it sent before would be begun first
            return
        self._paused = False
        data, self._unread = self._unread, b""
        self._socket.resume_reading()
        self._pass_on(data, _SLICE_S if self.new else max(self._share.turn_s, _SLICE_S))

    def _pass_on(self, data: bytes, slice_s: float) -> None:
        share = self._share
        began_s = time.perf_counter()
        until_s = began_s + slice_s
        more = self._handle(data)
        while more and not self._stopped and time.perf_counter() <= until_s:
            more = self._handle(b"")
        if self._stopped:
            return
        begun_s = self._start()
        took_s = share.cpu_s(time.perf_counter() - began_s)
        self._took_s += min(took_s, _COUNTED_S) + begun_s
        share.used(took_s + begun_s)
        pause_s = self.work.took(took_s, begun_s, self._loop.time())
        self._backlog = more or pause_s > 0
        if self._backlog or took_s > _YIELD_S:
            self._wait(pause_s)

    def _wait(self, pause_s: float = 0.0) -> None:
        """Read nothing until a later turn of the loop, after a pause."""
        if self._paused or self._stopped:
            return
        self._paused = True
        self._socket.pause_reading()
        if pause_s:
            self._loop.call_later(pause_s, self._share.wait, self)
        else:
            self._share.wait(self)


def _drop(_: bytes) -> bool:
    """Stand for the connection that is over."""
    return False


class RateLimit:
    """Allows a burst, and a steady rate after it. Times are the event loop's."""

    __slots__ = ("_at_s", "_left", "_most", "_per_s")

    def __init__(self, most: float, per_s: float, now_s: float) -> None:
        """Start full, with ``most`` permits; ``per_s`` come back."""
        self._most = self._left = most
        self._per_s = per_s
        self._at_s = now_s

    def take(self, now_s: float) -> bool:
        """Take a permit; return whether there was one."""
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1:
            return False
        self._left -= 1
        return True
