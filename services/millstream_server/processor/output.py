"""A running turn's output: its call pulls messages out of it.

Workers push tokens into the turn's choices. The first of them asks the call (`Call.ready`), and
when that can be written, it asks for the next message, which has all that has come meanwhile. So a
client that reads slowly gets fewer and longer messages, and nothing is stored twice.

Here is when a turn sends, how much waits, and what is taken for a message. `responses.Messages`
makes gRPC's messages of it, `http.output` events and bodies of HTTP.

A message to a client takes 10 to 40 µs of CPU, by the transport, plus 1 µs per token in it. While
the process has CPU time to spare, every token is sent at once. Otherwise all turns send at the same
times, and the interval between those grows, up to a limit: latency rises only at full load.

Full load means, measured every `_PERIOD_S`: the event loop's thread was busy for most of the
period, or the loop woke late (other processes use the cores, which busy time doesn't show). The
interval then grows by half; otherwise it shrinks by a fifth. Both are multiplicative, so that it
settles within half a second. When the process is full while many turns wait for their first token,
the interval becomes its maximum at once: later tokens wait so that first tokens needn't.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from millstream_server.links.unread import overflow
from millstream_server.processor.choice import MOST_TOKENS, Delta
from millstream_server.runtime.telemetry.metrics import PACING_INTERVAL

if TYPE_CHECKING:
    from millstream_server.processor.turn import Turn
    from millstream_server.runtime.errors import ServingError

_LATE_BYTES = 5 << 10
"""A client is late to read when so much waits, about 128 tokens: seconds of a chat."""
_PERIOD_S = 0.02
_BUSY = 0.75
_IDLE = 0.6
_LATE_S = 0.004
_FIRST_STEP_S = 0.001
_GROWTH, _DECAY = 1.5, 0.8
_BURST = 8
"""So many turns without a first token are a burst."""


class Pacer:
    """Keeps the current interval; one per process."""

    def __init__(self, max_interval_s: float) -> None:
        self.interval_s = 0.0
        self._max_interval_s = max_interval_s
        self.starting = 0
        """Turns that have written nothing yet."""
        self._task: asyncio.Task[None] | None = None
        self._later: list[Callable[[], None]] = []
        self._called_s = 0.0
        """When those before them were called."""

    def open(self) -> None:
        """Start measuring the load; call on the event loop's thread."""
        self._task = asyncio.ensure_future(self._watch())
        PACING_INTERVAL.set_function(lambda: self.interval_s)

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        PACING_INTERVAL.set_function(float)

    @property
    def is_full(self) -> bool:
        """Whether the process has had too much to do for some time, though turns send seldom."""
        return 0 < self._max_interval_s <= self.interval_s

    def later(self, ready: Callable[[], None]) -> None:
        """Call ``ready`` when the interval since the last such calls is over, with all others."""
        if not self._later:
            loop = asyncio.get_running_loop()
            loop.call_at(self._called_s + self.interval_s, self._call_ready)
        self._later.append(ready)

    def _call_ready(self) -> None:
        later, self._later = self._later, []
        self._called_s = asyncio.get_running_loop().time()
        for ready in later:
            ready()

    async def _watch(self) -> None:
        while True:
            wall, busy = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_PERIOD_S)
            elapsed = time.perf_counter() - wall
            self._adjust((time.thread_time() - busy) / elapsed, elapsed - _PERIOD_S)

    def _adjust(self, busy: float, late_s: float) -> None:
        if busy > _BUSY or late_s > _LATE_S:
            grown = max(_FIRST_STEP_S, self.interval_s * _GROWTH)
            burst = self.starting >= _BURST
            self.interval_s = self._max_interval_s if burst else min(self._max_interval_s, grown)
        elif busy < _IDLE:
            shrunk = self.interval_s * _DECAY
            self.interval_s = shrunk if shrunk >= _FIRST_STEP_S else 0.0


class OutputCall(Protocol):
    """What an output needs of its call; see `Call`."""

    @property
    def caller_key(self) -> str:
        """See `Call`."""

    def ready(self) -> None:
        """See `Call`."""

    def fail(self, failure: ServingError) -> None:
        """See `Call`."""


class TurnOutput:
    """When a turn's output is sent, and what waits for a client that doesn't read.

    Order of calls: `begin`; `Call.send_from` with it, until `over`; `close` always. A
    `links.unread.Gathering`.
    """

    __slots__ = ("_call", "_choices", "_drops", "_interval_s", "_late", "_nbytes", "_pacer",
                 "_sent_s", "_starting", "_timer", "_turn", "_uncounted", "_unread", "caller_key",
                 "gathers", "longest_interval_s", "over", "scheduled")  # fmt: skip

    def begin(self, turn: Turn, call: OutputCall) -> None:
        """Send the output of ``turn`` on ``call``; nothing is sent yet."""
        self.caller_key: Hashable = call.caller_key
        self._call = call
        self._turn: Turn | None = turn
        """None after its end: it knows this object."""
        self._choices = turn.choices
        self.over = False
        # When it is sent
        self.scheduled = False
        """The call was asked, or will be: more output changes nothing."""
        self._interval_s = turn.options.min_interval_s
        self._sent_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.longest_interval_s = 0.0
        self._starting = True
        self._pacer = turn.parts.pacer
        self._pacer.starting += 1
        # What it holds for a client that doesn't read
        self._unread = turn.parts.unread
        self.gathers = False
        self._nbytes = self._uncounted = 0
        self._late = False
        self._drops = False
        """Too much has gathered, or nobody will read it: what still comes is dropped."""

    def close(self) -> None:
        """Stop, without a message or error. May be called at any time."""
        self._begin_interval()
        self._stop_counting()
        self._turn = None
        self.scheduled = self.gathers = self._drops = True

    # ---- when it is sent

    def schedule(self) -> None:
        """Ask the call to be written: at once, or after the interval since the last message."""
        self.scheduled = True
        pacer = self._pacer
        if self._starting:
            self._call.ready()
        elif self._interval_s:
            interval_s = max(self._interval_s, pacer.interval_s)
            loop = asyncio.get_running_loop()
            wait_s = self._sent_s + interval_s - loop.time()
            if wait_s <= 0:
                self._call.ready()
                return
            self.longest_interval_s = max(self.longest_interval_s, interval_s)
            self._timer = loop.call_later(wait_s, self._call.ready)
        elif pacer.interval_s:
            self.longest_interval_s = max(self.longest_interval_s, pacer.interval_s)
            pacer.later(self._call.ready)
        else:
            self._call.ready()

    def send_now(self) -> None:
        """Ask the call to be written at once: an end, an error, or the rest of a message."""
        self.scheduled = True
        self._call.ready()

    def _begin_interval(self) -> None:
        self.scheduled = False
        self.gathers = bool(self._interval_s)
        if self._interval_s:
            self._sent_s = asyncio.get_running_loop().time()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if self._starting:
            self._starting = False
            self._pacer.starting -= 1

    def _end(self, turn: Turn) -> None:
        """Note that the last message is made: it can't be taken back.

        Raises:
            ServingError: what should come before it was dropped.
        """
        if turn.error is not None:
            raise turn.error
        self.over = True
        self._stop_counting()

    # ---- what it holds for a client that doesn't read

    def count(self, nbytes: int) -> None:
        """Count output that has come while the call can't be written."""
        if self._late:  # in steps: to count a token takes longer than to keep it
            self._uncounted += nbytes
            if self._uncounted < _LATE_BYTES:
                return
            nbytes, self._uncounted = self._uncounted, 0
        if self._drops:
            self._drop()
            return
        if not self._nbytes:
            nbytes = sum(choice.held_bytes for choice in self._choices)  # also what came before
        if nbytes:
            self._nbytes += nbytes
            self._unread.add(self, nbytes)
            if self._nbytes > _LATE_BYTES and not self._late:
                self._look_if_late()

    def _look_if_late(self) -> None:
        # With an interval output waits anyway; `add` may have ended it.
        waited_s = asyncio.get_running_loop().time() - self._sent_s
        runs = None in [choice.result for choice in self._choices]
        if waited_s > 2 * self._interval_s and runs and not self._drops:
            self._late, self._uncounted = True, 0
            self._unread.late.add(self)

    def workers_ended(self) -> None:
        """Note that no worker runs for it any more: from now on what waits costs memory only."""
        if self._late:
            self._late = False
            self._unread.late.remove(self)

    def _recount(self) -> None:
        if self._nbytes:
            self._stop_counting()
            self.count(0)

    def _stop_counting(self) -> None:
        self.workers_ended()
        nbytes, self._nbytes = self._nbytes, 0
        if nbytes:
            self._unread.remove(self, nbytes)

    def _drop(self) -> None:
        for choice in self._choices:
            choice.drop()

    def overflowed(self) -> None:
        """End: the client doesn't read, and what it has not read is dropped."""
        if self._turn is not None:
            error = self._turn.error = overflow()
            self._drops = True
            self._drop()
            self._stop_counting()
            self._turn.cancel()
            self._call.fail(error)


class PulledOutput(TurnOutput, ABC):
    """A turn's output in messages of some kind; a `runtime.rpc.call.Source`."""

    __slots__ = ("_first_token_sent", "_parts_left", "_quick")

    def __init__(self) -> None:
        """Nothing was sent yet."""
        self._first_token_sent = False
        self._quick = False
        """What comes next is a text and a token count, most probably."""
        self._parts_left: Iterator[Any] | None = None
        """The messages of output that needs several."""

    def close(self) -> None:
        self._parts_left = None  # it knows this object
        super().close()

    @abstractmethod
    def _of_text(self, text: str, tokens: int) -> Any:
        """Make a message that is not the first: one choice's text and its number of tokens."""

    @abstractmethod
    def _of(
        self, deltas: Sequence[Delta], turn: Turn, *, complete: bool
    ) -> tuple[Any] | Iterator[Any]:
        """Make one message, or None in its place, or, of large output, several.

        With the last one, of a turn that is ``complete``, it calls `_end`.
        """

    def next(self) -> Any:
        """Make a message of what has come; see `Source.next`.

        Raises:
            ServingError: a choice failed; its output before that was sent, unless so much gathered
            that it was dropped.
        """
        if self._interval_s or self._starting:
            self._begin_interval()
        else:
            self.scheduled = self.gathers = False
        turn = self._turn
        if turn is None:
            return None
        choice = self._choices[0]
        if (
            self._quick
            and choice.unsent
            and choice.result is None
            and turn.error is None
            and not self._nbytes
            and len(choice.unsent) <= MOST_TOKENS
        ):
            return self._of_text(*choice.take_text())
        return self._next(turn)

    def _next(self, turn: Turn) -> Any:
        """Make any message; that of a token takes less time."""
        if self._drops and turn.error:
            raise turn.error
        if self._parts_left is not None and (part := self._next_part()) is not None:
            return part
        deltas = self._take(turn)
        self._recount()
        complete = turn.complete
        if complete:
            turn.error = None  # too late: everything has been made
        if not deltas:
            if turn.error:
                raise turn.error
            return None
        made = self._of(deltas, turn, complete=complete)
        if isinstance(made, tuple):  # nearly always
            if turn.error or (not complete and any(c.has_more for c in self._choices)):
                self.send_now()
            return made[0]
        self._parts_left = made
        return self._next_part()

    def _next_part(self) -> Any:
        """Make the next message of output that needs several; None: there is none."""
        message = None if self._parts_left is None else next(self._parts_left, None)
        if message is None or self.over:
            self._parts_left = None  # it knows this object
        else:
            self.send_now()
        return message

    def _take(self, turn: Turn) -> list[Delta]:
        failed = turn.error is not None
        taken = [choice.take(failed=failed) for choice in self._choices]
        deltas = [delta for delta in taken if delta is not None]
        if not self._first_token_sent and any(delta.token_ids for delta in deltas):
            self._first_token_sent = True
            options = turn.options
            extras = (
                options.return_token_ids or turn.request.logprobs or options.stops or turn.reading
            )
            self._quick = options.n == 1 and not extras
            turn.telemetry.first_token()
        return deltas
