"""The step loop of one data-parallel rank: every step brings each running request a token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.job import Job, logprob
from millstream_server.generation.output import FinishReason

BLOCK_TOKENS = 4
"""Tokens of a block of a diffusion language model."""

Recorder = Callable[[float, float, int], None]
"""Receives each step: when it began (clock of `time.perf_counter`), seconds, requests."""


class Gate:
    """Stops a rank: a hang (a test's), or a pause (an operator's)."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._wedged = False
        self.paused = False

    def set(self, *, wedged: bool | None = None, paused: bool | None = None) -> None:
        """Begin or end a hang or a pause; None: that stays as it is."""
        self._wedged = self._wedged if wedged is None else wedged
        self.paused = self.paused if paused is None else paused
        if self._wedged or self.paused:
            self._open.clear()
        else:
            self._open.set()

    async def wait(self) -> None:
        await self._open.wait()


class StepLoop:
    """The requests that generate, and the task that makes their tokens."""

    def __init__(
        self,
        config: SimulatedConfig,
        gate: Gate,
        on_first: Callable[[Job], None],
        on_end: Callable[[Job, FinishReason, int | None], None],
    ) -> None:
        self._config = config
        self._gate = gate
        self._on_first = on_first
        self._on_end = on_end
        self._running: dict[str, Job] = {}
        self._new: list[Job] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.count = 0
        """Steps so far."""
        self.recorder: Recorder | None = None

    def start(self) -> None:
        """Run steps while there are requests, until `close`."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    def add(self, job: Job) -> None:
        """Generate a request's tokens from the next step on."""
        self._running[job.request.engine_id] = job
        self._new.append(job)
        self._work.set()

    def remove(self, job: Job) -> None:
        """Generate no more tokens of a request."""
        self._running.pop(job.request.engine_id, None)

    async def _run(self) -> None:
        step_s = self._config.step_s
        step = self._denoise if self._config.role is Role.DIFFUSION else self._step
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
            await self._gate.wait()
            if self._new:
                self._begin()
            self.count += 1
            if self.recorder is None:
                step()
            else:
                self._record(self.recorder, step)
            due = max(due + step_s, loop.time() - step_s)  # a late step doesn't speed up the next
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _begin(self) -> None:
        new, self._new = self._new, []
        for job in new:
            if self._running.get(job.request.engine_id) is job:
                self._on_first(job)

    def _record(self, recorder: Recorder, step: Callable[[], None]) -> None:
        requests, began = len(self._running), time.perf_counter()
        step()
        recorder(began, time.perf_counter() - began, requests)

    def _step(self) -> None:
        """Generate one token for every running request."""
        vocab_size = self._config.vocab_size
        ended: list[tuple[Job, FinishReason, int | None]] = []
        for job in self._running.values():
            job.token = token = (job.token + job.step) % vocab_size
            job.generated = generated = job.generated + 1
            if job.logprobs_top is None:
                job.sink.emit((token,))
            else:
                job.sink.emit((token,), (logprob(token, job.logprobs_top, vocab_size),))
            if token in job.stop_ids and generated >= job.request.sampling.min_new_tokens:
                ended.append((job, FinishReason.STOP, token))
            elif generated == job.limit:
                ended.append((job, FinishReason.LENGTH, None))
        for job, reason, matched in ended:
            self._on_end(job, reason, matched)

    def _denoise(self) -> None:
        """Generate the rest of the current block for every running request."""
        for job in list(self._running.values()):
            wanted = min(BLOCK_TOKENS - job.known_tokens % BLOCK_TOKENS, job.limit - job.generated)
            block: list[int] = []
            while len(block) < wanted:
                job.token = (job.token + job.step) % self._config.vocab_size
                block.append(job.token)
                if job.token in job.stop_ids:
                    break
            job.generated += len(block)
            job.sink.emit(block)
            if job.token in job.stop_ids:
                self._on_end(job, FinishReason.STOP, job.token)
            elif job.generated == job.limit:
                self._on_end(job, FinishReason.LENGTH, None)
