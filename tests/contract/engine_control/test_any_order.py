"""Operations in any order, whose callers leave at any time, while requests come and go."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from millstream_server.control.operations import MemoryTag, NamedTensor, PauseMode
from millstream_server.engines.simulated.controls import TENSOR
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import (
    DeadlinePassedError,
    EngineBusyError,
    OperationConflictError,
)
from millstream_server.worker.control.core import ControlCore
from millstream_server.worker.control.weights import Piece, TensorsInCall, Update
from millstream_server.worker.control.wire import state_to_proto
from millstream_testing.in_process import ALPHABET, InProcessWorker, worker
from millstream_testing.waiting import until
from tests.support.worker.worker_streams import Stream, decode_stream

STEPS = 150
REFUSALS = (DeadlinePassedError, EngineBusyError, OperationConflictError)
"""What an operation may end with here."""


class Operators:
    """Several callers of one worker's operations."""

    def __init__(self, one: InProcessWorker, rng: random.Random) -> None:
        self.control = ControlCore(one.host, one.server.conditions, 0.01)
        self.calls: list[asyncio.Task[Any]] = []
        self.drained = False
        """Whether a Drain ended, after which there was no Undrain."""
        self._one = one
        self._rng = rng
        self._versions = count(1)

    def call(self) -> None:
        """Begin any operation."""
        self.calls.append(asyncio.ensure_future(self._any()))

    def leave(self) -> None:
        """Have any caller leave."""
        if running := [call for call in self.calls if not call.done()]:
            self._rng.choice(running).cancel()

    def check(self) -> None:
        """Check what must hold at any time."""
        conditions, state = set(self._one.server.conditions.holding), state_to_proto(self.control)
        refuses, will_refuse = self._one.host.work.paused, self.control.stop._timer is not None
        assert bool(conditions) == (refuses or will_refuse), "it seems to serve, and doesn't"
        assert ("drained" in conditions, "paused" in conditions) == (state.drained, state.paused)
        assert state.operation == "Drain" or state.drained == self.drained
        assert "memory released" in conditions or not state.released
        assert state.operation or conditions <= {"drained", "paused", "memory released"}
        for call in self.calls:
            if call.done() and not call.cancelled() and (error := call.exception()):
                assert isinstance(error, REFUSALS), error

    async def settle(self) -> None:
        """Undo all that is left."""
        for call in self.calls:
            call.cancel()
        await asyncio.gather(self.control.pause.go_on(), *self.calls, return_exceptions=True)
        self.check()
        await self._undrain()
        await self.control.memory.resume([])

    def _any(self) -> Coroutine[Any, Any, Any]:
        control, rng = self.control, self._rng
        timeout_s = rng.choice([None, None, 0.0, 0.02])
        tags = rng.sample(list(MemoryTag), rng.randint(0, 3))
        update = Update(version=f"v{next(self._versions)}", source=_tensors(), timeout_s=timeout_s)
        made: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            lambda: self._drain(timeout_s),
            *2 * [self._undrain],
            lambda: control.pause.pause(rng.choice(list(PauseMode))),
            control.pause.go_on,
            lambda: control.memory.release(control.report(), tags, timeout_s),
            lambda: control.memory.resume(tags),
            lambda: control.weights.update(control.report(), update),
            lambda: control.cache.flush(drain=rng.random() < 0.7, timeout_s=timeout_s),
        ]
        return rng.choice(made)()

    async def _drain(self, timeout_s: float | None) -> None:
        with contextlib.suppress(DeadlinePassedError):  # it stays drained
            await self.control.drain.drain(self.control.report(), timeout_s)
        self.drained = True

    async def _undrain(self) -> None:
        self.control.drain.undrain()
        self.drained = False


def _tensors() -> TensorsInCall:
    async def parts() -> AsyncIterator[NamedTensor | Piece]:
        yield NamedTensor(TENSOR, TensorSpec(ElementType.FLOAT32, (1,)))
        await asyncio.sleep(0)
        yield Piece(0, bytes(4))

    return TensorsInCall(parts())


async def _requests(stream: Stream, rng: random.Random, enough: asyncio.Event) -> int:
    """Run requests, some of which are cancelled; return how many were refused."""
    refused = 0
    for slot in count():
        await stream.start(slot, [5, 6, 7], max_new_tokens=rng.randint(1, 20), ignore_eos=True)
        if rng.random() < 0.2:
            await stream.cancel(slot)
        (view,) = await stream.ended(slot)
        assert view.finish or view.reason in {"WORKER_PAUSED", "CANCELLED"}, view.error
        refused += view.finish is None and view.reason == "WORKER_PAUSED"
        if enough.is_set() and view.finish:
            break
    await stream.drain()
    return refused


@pytest.mark.parametrize("seed", [1, 2])
async def test_requests_end_and_the_worker_comes_back(seed: int) -> None:
    rng, enough = random.Random(seed), asyncio.Event()
    async with worker(replace(ALPHABET, step_s=0.001)) as one:
        operators = Operators(one, rng)
        clients = [
            asyncio.ensure_future(_requests(decode_stream(one.decode), rng, enough))
            for _ in range(3)
        ]
        for _ in range(STEPS):
            rng.choice([operators.call, operators.call, operators.leave])()
            for _ in range(rng.choice([0, 1, 2, 5])):  # the loop's steps, to any point of any call
                await asyncio.sleep(0)
                operators.check()
            await asyncio.sleep(rng.choice([0, 0.001, 0.02]))  # and times, to any stage
            operators.check()
        await operators.settle()
        assert one.server.conditions.holding == ()
        assert state_to_proto(operators.control).operation == ""
        enough.set()
        refused = await asyncio.wait_for(asyncio.gather(*clients), 10)
        assert sum(refused), "some came while it was out of service"
        await until(lambda: not one.host.work.count)
