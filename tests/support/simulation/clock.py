"""An event loop whose time only passes when nothing is left to do, and the clocks that follow it.

Nothing waits for real: an hour of pauses takes no time. The run controls every source of time and
chance, so the same seed gives the same run, step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import secrets
import time
from asyncio import base_events
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterator
from contextvars import Context
from typing import Any, TypeVar
from unittest import mock

from tests.support.simulation.network import NODE, Network

T = TypeVar("T")

_EPOCH_S = 1_800_000_000.0
_RESOLUTION_S = 1e-6


class NothingLeftError(Exception):
    """Everything waits, and nothing will ever happen: a hang."""


class SimulatedLoop(base_events.BaseEventLoop):
    """Runs callbacks in order; connections between nodes are those of `network`.

    There are no files and no other threads, so to wait means that time passes.
    """

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.now_s = 0.0
        self.network = network
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        """A heap by time and order; tuples, since `TimerHandle.__lt__` took a tenth of a run."""
        self._made = 0
        self.tasks: defaultdict[str, set[asyncio.Task[Any]]] = defaultdict(set)
        """Of each node, those that run."""
        self.set_task_factory(_node_tasks)

    def time(self) -> float:
        return self.now_s

    def wall_s(self) -> float:
        """Return what the wall clock of the node says whose task runs."""
        return _EPOCH_S + self.now_s + self.network.skews_s.get(NODE.get(), 0.0)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self._made += 1
        heapq.heappush(self._timers, (when, self._made, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays until its time: asyncio's own heap isn't used."""

    def _run_once(self) -> None:
        """Call what is ready; if nothing is, let time pass until the next timer.

        Raises:
            NothingLeftError: there is none.
        """
        ready, timers = self._ready, self._timers
        stopping: bool = vars(self)["_stopping"]  # asyncio's own, of `loop.stop`
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready and not stopping:
            if not timers:
                raise NothingLeftError
            self.now_s = max(self.now_s, timers[0][0])
        until_s = self.now_s + _RESOLUTION_S
        while timers and timers[0][0] < until_s:
            ready.append(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _write_to_self(self) -> None:
        pass

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Call it at once: threads would bring chance of their own."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whoever awaits it gets it
            future.set_exception(error)
        return future

    async def create_server(self, make: Any, host: Any = None, port: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return self.network.listen(make, host, port)

    async def create_connection(  # type: ignore[override]
        self, make: Any, host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return await self.network.dial(make, host, port)


def _node_tasks(loop: Any, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    node = context.get(NODE, "") if context else NODE.get()
    loop.tasks[node].add(task)
    task.add_done_callback(loop.tasks[node].discard)
    return task


@contextlib.contextmanager
def simulated(loop: SimulatedLoop, seed: int) -> Iterator[None]:
    """Let all clocks follow the loop, and all chance come of ``seed``, in a ``with`` block."""
    chance = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    patches = {
        (time, "monotonic"): loop.time,
        (time, "perf_counter"): loop.time,
        (time, "time"): loop.wall_s,
        (time, "time_ns"): lambda: int(loop.wall_s() * 1e9),
        (time, "thread_time"): lambda: 0.0,  # the process is never busy
        (secrets, "randbits"): chance.getrandbits,
        (secrets, "token_hex"): lambda nbytes=8: f"{chance.getrandbits(8 * nbytes):0{2 * nbytes}x}",
    }
    with contextlib.ExitStack() as stack:
        for (module, name), instead in patches.items():
            stack.enter_context(mock.patch.object(module, name, instead))
        stack.callback(random.setstate, state)
        yield


def run(loop: SimulatedLoop, seed: int, main: Callable[[], Awaitable[T]]) -> T:
    """Run ``main`` on the loop to its end.

    Raises:
        NothingLeftError: it waits for what never happens.
    """
    with simulated(loop, seed):
        asyncio.set_event_loop(loop)
        try:
            return loop.run_until_complete(main())
        finally:
            asyncio.set_event_loop(None)
            loop.close()
