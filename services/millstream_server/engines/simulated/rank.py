"""One data-parallel rank of the simulated engine: its queue, stages, steps and KV cache."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from millstream_server.control.engine import RankLoad, Role
from millstream_server.engines.gate import Gate, Hold
from millstream_server.engines.simulated import transfer as simulated_transfer
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.job import Job, logprob
from millstream_server.engines.simulated.prefix_cache import PrefixCache
from millstream_server.generation.output import FinishReason
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.ticket import Ticket
from millstream_server.runtime.errors import InvalidRequestError, KvTransferError, ServingError

BLOCK_TOKENS = 4
"""Tokens of a block of a diffusion language model."""

Recorder = Callable[[float, float, int], None]
"""Receives each step: when it began (clock of `time.perf_counter`), seconds, requests."""


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
            await self._gate.passed()
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
            token, generated = job.advance(), job.generated
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
                block.append(job.advance())
                if job.token in job.stop_ids:
                    break
            job.sink.emit(block)
            if job.token in job.stop_ids:
                self._on_end(job, FinishReason.STOP, job.token)
            elif job.generated == job.limit:
                self._on_end(job, FinishReason.LENGTH, None)


class Rank:
    """Takes a request from the queue through prefill or transfer to the step loop.

    A request holds KV blocks for its longest possible length from the queue's end to its own. Its
    prompt's full blocks are cached with the first token, the output's at the end.
    """

    def __init__(
        self,
        config: SimulatedConfig,
        dp_rank: int,
        on_released: Callable[[GenerationRequest], None],
    ) -> None:
        """``on_released`` is called when a request has left the rank, before its end is told."""
        self._config = config
        self._dp_rank = dp_rank
        self._on_released = on_released
        self._jobs: dict[str, Job] = {}
        self._waiting: deque[Job] = deque()
        self._transfers = 0
        self.gate = Gate()
        self.steps = StepLoop(config, self.gate, self._computed, self._end)
        self.cache = PrefixCache(config.total_blocks)
        self.bootstrap: simulated_transfer.Bootstrap | None = None
        """Where prefill offers KV; all ranks share it."""

    @property
    def open_requests(self) -> int:
        return len(self._jobs)

    @property
    def progress(self) -> int:
        return self.steps.count + self._transfers

    def uses_adapter(self, name: str) -> bool:
        return any(job.request.adapter == name for job in self._jobs.values())

    def submit(self, job: Job) -> None:
        """Queue a request; one that never fits fails."""
        if job.blocks > self._config.total_blocks:
            sentence = f"takes {job.blocks} KV blocks of {self._config.total_blocks} there are"
            job.sink.fail(InvalidRequestError.of("sampling.max_new_tokens", sentence))
            return
        self._jobs[job.request.engine_id] = job
        self._waiting.append(job)
        self._admit()

    def abort(self, engine_id: str) -> bool:
        """Stop a request at any stage, its blocks are free on return; False: it isn't here."""
        job = self._jobs.get(engine_id)
        if job is None:
            return False
        self._end(job, FinishReason.CANCELLED, None)
        return True

    def fail_all(self, error: Callable[[], ServingError]) -> None:
        for job in reversed(list(self._jobs.values())):  # the latest first: no queued one starts
            self._release(job)
            job.sink.fail(error())

    def retract(self) -> None:
        """Put running requests back into the queue's front; their KV is lost."""
        for job in reversed([job for job in self._jobs.values() if job.held is not None]):
            self._free(job)
            job.prefilled = False
            self._waiting.appendleft(job)

    def go_on(self) -> None:
        self.gate.release(Hold.PAUSED)
        self._admit()

    def load(self) -> RankLoad:
        return RankLoad(
            running_requests=len(self._jobs) - len(self._waiting),
            queued_requests=len(self._waiting),
            queued_tokens=sum(map(self._uncached, self._waiting)),
            used_blocks=self.cache.used_blocks,
            total_blocks=self._config.total_blocks,
        )

    def _uncached(self, job: Job) -> int:
        known = job.known_tokens
        cached = self.cache.count_cached(job.hashes_of(known - 1))
        return known - cached * self._config.block_size

    # ---- stages ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move requests from the queue into prefill or transfer, first come first served."""
        config = self._config
        while self._waiting and not self.gate.holds(Hold.PAUSED):
            job = self._waiting[0]
            if len(self._jobs) - len(self._waiting) >= config.max_running_per_rank:
                return
            hashes = job.hashes_of(job.known_tokens - 1)  # the last token is always computed
            job.held = self.cache.acquire(hashes, job.blocks, job.request.adapter)
            if job.held is None:
                return
            self._waiting.popleft()
            if not job.generated:
                job.cached_tokens = job.held.cached * config.block_size
            if job.request.ticket or (config.prefill_s_per_token and not config.role.hands_off):
                uncached = job.known_tokens - job.held.cached * config.block_size
                job.stage = asyncio.ensure_future(self._prepare(job, uncached))
            else:
                self.steps.add(job)

    async def _prepare(self, job: Job, uncached_tokens: int) -> None:
        """Prefill the prompt or fetch its cache; then decode or offer the cache."""
        config, request = self._config, job.request
        try:
            if config.role is Role.DECODE:
                assert request.ticket is not None  # noqa: S101 - checked by generation.validation
                job.step += await self._received(request.ticket, job)
            elif config.prefill_s_per_token:
                await asyncio.sleep(config.prefill_s_per_token * uncached_tokens)
            await self.gate.passed()
            if config.role is Role.PREFILL:
                await self._hand_over(job)
                return
        except KvTransferError as error:
            self._release(job)
            job.sink.fail(error)
            return
        job.stage = None
        self.steps.add(job)

    async def _received(self, ticket: Ticket, job: Job) -> int:
        """Get the prompt's cache; return the number of its media's tensors."""
        prompt, given = job.request.prompt, ticket.engine_data
        if self._config.prefill_first:
            return simulated_transfer.read(given.data if given else b"", ticket, prompt, job.shift)
        return await simulated_transfer.fetch(
            ticket, prompt, self._config.handoff_wait_s, job.shift
        )

    async def _hand_over(self, job: Job) -> None:
        ticket, bootstrap = job.request.ticket, self.bootstrap
        assert ticket is not None  # noqa: S101 - checked by generation.validation
        assert bootstrap is not None  # noqa: S101 - made by the engine's start in this role
        self._computed(job)
        offer = simulated_transfer.Offer(job.request.prompt, self._dp_rank, job.shift)
        if self._config.prefill_first:
            job.engine_data = offer.data(self._config)
        else:
            await bootstrap.hand_over(ticket.room, offer, self._config.handoff_wait_s)
        job.generated = 1
        self._transfers += 1
        self._end(job, FinishReason.LENGTH, None)

    def _computed(self, job: Job) -> None:
        """Cache the blocks of a prompt that has just been computed."""
        job.prefilled = True
        self._store(job)

    def _store(self, job: Job) -> None:
        if job.held is not None and job.prefilled:
            self.cache.store(job.held, job.hashes_of(job.computed_tokens))

    def _end(self, job: Job, reason: FinishReason, matched: int | None) -> None:
        self._store(job)
        self._release(job)
        job.end(reason, matched)

    def _release(self, job: Job) -> None:
        """Remove a request from its stage and free its blocks."""
        del self._jobs[job.request.engine_id]
        if job.held is None:
            self._waiting.remove(job)
        else:
            self._free(job)
        self._on_released(job.request)
        self._admit()

    def _free(self, job: Job) -> None:
        """Take a running request out of its stage, and give its blocks back."""
        self.steps.remove(job)
        if job.stage is not None and job.stage is not asyncio.current_task():
            job.stage.cancel()
        job.stage = None
        if job.held is not None:
            self.cache.release(job.held)
            job.held = None
