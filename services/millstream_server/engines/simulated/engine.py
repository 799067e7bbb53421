"""A deterministic engine: predictable tokens, a timing model, KV block accounting.

The rule: every token is the one before plus one, modulo the vocabulary; the first follows the
prompt's last. Prompt [7, 41] gives 42, 43, 44, … A token equal to ``eos_token_id`` (if set) or to a
stop token ends it. So a request continued on another worker, with the tokens so far in its prompt,
gives the same tokens. All logprobs are -0.5; the alternatives are the next token ids. Images and
videos change the step from one token to the next: see `engines.simulated.media`.

In the role DIFFUSION it plays a diffusion language model: the same tokens, but a step brings the
rest of a block of `BLOCK_TOKENS`, where the blocks begin with the prompt.

It is part of the package: for contract tests, scale tests and routing studies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from millstream_server.engines.base import EngineLoad, Role
from millstream_server.engines.simulated import media
from millstream_server.engines.simulated import transfer as simulated_transfer
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.output import (
    CollectingSink,
    Finish,
    FinishReason,
    OutputSink,
    TokenLogprob,
)
from millstream_server.generation.refused_fields import REFUSED_IN_DIFFUSION
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Ability, Sampling
from millstream_server.runtime.errors import (
    EngineFailedError,
    InvalidRequestError,
    KvTransferError,
    ServingError,
)

_LOGPROB = -0.5
BLOCK_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedConfig:
    """The simulated model and machine."""

    role: Role = Role.AGGREGATED
    vocab_size: int = 32000
    context_length: int = 8192
    block_size: int = 16
    total_blocks: int = 1 << 20
    max_running_requests: int = 4096
    step_s: float = 0.0
    """Seconds per decode step, for any batch size; 0: as fast as possible."""
    prefill_s_per_token: float = 0.0
    load_s: float = 0.0
    eos_token_id: int | None = None
    bootstrap_host: str = "127.0.0.1"
    bootstrap_port: int = 0
    transfer_timeout_s: float = 30.0
    media: MediaModel | None = None
    """What the model takes besides text; None: nothing."""


@dataclass(slots=True, eq=False)
class _Job:
    """One request: queue → prefill → (transfer) → decode."""

    request: GenerationRequest
    sink: OutputSink
    stop_ids: frozenset[int]
    token: int
    blocks: int
    left: int
    step: int = 1
    """What is added to a token for the next one."""
    generated: int = 0
    stage: asyncio.Task[None] | None = None
    """The running prefill or transfer."""
    logprobs_top: int | None = field(default=None)

    def end(self, reason: FinishReason, matched: int | None = None) -> None:
        """Report the terminal result."""
        request = self.request
        prompt = request.logprobs is not None and request.logprobs.prompt
        self.sink.finish(
            Finish(
                reason=reason,
                prompt_tokens=len(request.token_ids),
                completion_tokens=self.generated,
                media_tokens=request.prompt.media_tokens,
                matched_token_id=matched,
                prompt_logprobs=_prompt_logprobs(request.token_ids) if prompt else (),
            )
        )


class SimulatedEngine:
    """Satisfies `engines.base.Engine`.

    One class of 250 lines: queue, stages and step loop share the same jobs and block counts, and
    parts of their own would only hand these to each other.
    """

    def __init__(self, config: SimulatedConfig) -> None:
        """Simulate ``config``."""
        self._config = config
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._running: dict[str, _Job] = {}
        self._used_blocks = 0
        self._progress = 0
        self._going = asyncio.Event()
        self._going.set()
        self._work = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._bootstrap: simulated_transfer.Bootstrap | None = None

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        """Load for ``load_s`` seconds and start the step loop. It never fails by itself."""
        config = self._config
        await asyncio.sleep(config.load_s)
        port = 0
        if config.role is Role.PREFILL:
            self._bootstrap = simulated_transfer.Bootstrap()
            try:
                port = await self._bootstrap.listen(config.bootstrap_host, config.bootstrap_port)
            except OSError as error:
                raise EngineFailedError(
                    "the bootstrap port can't be bound; is it taken?"
                ) from error
        self._loop_task = asyncio.ensure_future(self._run())
        diffusion = config.role is Role.DIFFUSION
        return GeneratorInfo(
            engine="simulated",
            engine_version="1",
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            block_size=config.block_size,
            total_blocks=config.total_blocks,
            max_running_requests=config.max_running_requests,
            abilities=frozenset() if diffusion else frozenset(Ability) - {Ability.CONSTRAINTS},
            refused_fields=REFUSED_IN_DIFFUSION if diffusion else frozenset(),
            bootstrap_host=config.bootstrap_host if port else "",
            bootstrap_port=port,
            media=config.media,
        )

    async def warm_up(self) -> None:
        """Generate one token, in any role without a peer."""
        await self.probe(0)

    def progress(self, dp_rank: int) -> int:
        """Return the number of steps and transfers."""
        return self._progress

    async def probe(self, dp_rank: int) -> None:
        """Generate one token in the step loop, in any role without a hand-off."""
        sink = CollectingSink()
        request = GenerationRequest(prompt=Prompt((1,)), sampling=Sampling(max_new_tokens=1))
        self.submit(request, sink)
        try:
            await sink.result()
        finally:
            self.abort(request.engine_id)

    def wedge(self) -> None:
        """Simulate a hang: requests are accepted and aborted, without output or failures."""
        self._going.clear()

    def unwedge(self) -> None:
        """End the hang."""
        self._going.set()

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Queue a request. While it runs it holds blocks for its longest possible length."""
        sampling, prompt = request.sampling, request.prompt
        stop_ids = set(sampling.stop_token_ids)
        if self._config.eos_token_id is not None and not sampling.ignore_eos:
            stop_ids.add(self._config.eos_token_id)
        left = 1 if self._config.role is Role.PREFILL else sampling.max_new_tokens
        job = _Job(
            request=request,
            sink=sink,
            stop_ids=frozenset(stop_ids),
            token=request.token_ids[-1],
            blocks=-(-(len(request.token_ids) + left) // self._config.block_size),
            left=left,
            step=1 + media.of_digests(prompt.media) + media.of_tensors(prompt.media),
            logprobs_top=request.logprobs.top if request.logprobs else None,
        )
        if job.blocks > self._config.total_blocks:
            sentence = f"takes {job.blocks} KV blocks of {self._config.total_blocks} there are"
            sink.fail(InvalidRequestError.of("sampling.max_new_tokens", sentence))
            return
        self._jobs[request.engine_id] = job
        self._waiting.append(job)
        self._admit()

    def abort(self, engine_id: str) -> None:
        """Stop a request at any stage; its blocks are free on return."""
        job = self._jobs.get(engine_id)
        if job:
            self._release(job)
            job.end(FinishReason.CANCELLED)

    async def load(self) -> EngineLoad:
        """Return the queue's length and the blocks in use."""
        return EngineLoad(
            running_requests=len(self._jobs) - len(self._waiting),
            queued_requests=len(self._waiting),
            used_blocks=self._used_blocks,
            total_blocks=self._config.total_blocks,
        )

    async def close(self) -> None:
        """Stop stepping; open requests fail."""
        for job in reversed(list(self._jobs.values())):  # the latest first: no queued one starts
            self._release(job)
            job.sink.fail(EngineFailedError("the engine was closed"))
        if self._bootstrap:
            await self._bootstrap.close()
        if self._loop_task:
            self._loop_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loop_task
            self._loop_task = None

    # ---- stages ----------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Move requests from the queue into prefill or transfer, first come first served."""
        config = self._config
        while self._waiting:
            job = self._waiting[0]
            busy = len(self._jobs) - len(self._waiting)
            if (
                busy >= config.max_running_requests
                or self._used_blocks + job.blocks > config.total_blocks
            ):
                return
            self._waiting.popleft()
            self._used_blocks += job.blocks
            if job.request.ticket or (config.prefill_s_per_token and not config.role.hands_off):
                job.stage = asyncio.ensure_future(self._prepare(job))
            else:
                self._run_now(job)

    def _run_now(self, job: _Job) -> None:
        self._running[job.request.engine_id] = job
        self._work.set()

    async def _prepare(self, job: _Job) -> None:
        """Prefill the prompt or fetch its cache; then decode or offer the cache."""
        config = self._config
        request = job.request
        try:
            if config.role is Role.DECODE:
                assert request.ticket is not None  # noqa: S101 - checked by generation.validation
                job.step += await simulated_transfer.fetch(
                    request.ticket, request.prompt, config.transfer_timeout_s
                )
            elif config.prefill_s_per_token:
                await asyncio.sleep(config.prefill_s_per_token * len(request.token_ids))
            await self._going.wait()
            if config.role is Role.PREFILL:
                await self._hand_over(job)
                return
        except KvTransferError as error:
            self._release(job)
            job.sink.fail(error)
            return
        job.stage = None
        self._run_now(job)

    async def _hand_over(self, job: _Job) -> None:
        ticket = job.request.ticket
        assert ticket is not None  # noqa: S101 - checked by generation.validation
        assert self._bootstrap is not None  # noqa: S101 - made by start in this role
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_taken() -> None:
            if not taken.done():
                taken.set_result(None)

        self._bootstrap.offer(ticket.room, job.request.prompt, on_taken)
        try:
            async with asyncio.timeout(self._config.transfer_timeout_s):
                await taken
        except TimeoutError as error:
            raise KvTransferError("no decode worker came for the KV cache in time") from error
        finally:
            self._bootstrap.withdraw(ticket.room)
        job.generated = 1
        self._progress += 1
        self._release(job)
        job.end(FinishReason.LENGTH)

    async def _run(self) -> None:
        """Run steps while there is work."""
        step_s = self._config.step_s
        step = self._denoise if self._config.role is Role.DIFFUSION else self._step
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if not self._running:
                self._work.clear()
                await self._work.wait()
                due = loop.time()
            await self._going.wait()
            step()
            due = max(due + step_s, loop.time() - step_s)  # a late step doesn't speed up the next
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _step(self) -> None:
        """Generate one token for every running request."""
        vocab_size = self._config.vocab_size
        ended: list[tuple[_Job, FinishReason, int | None]] = []
        self._progress += 1
        for job in self._running.values():
            job.token = token = (job.token + job.step) % vocab_size
            job.generated += 1
            job.left -= 1
            if job.logprobs_top is None:
                job.sink.emit((token,))
            else:
                job.sink.emit((token,), (_logprob(token, job.logprobs_top, vocab_size),))
            stopped = token in job.stop_ids
            if stopped and job.generated >= job.request.sampling.min_new_tokens:
                ended.append((job, FinishReason.STOP, token))
            elif not job.left:
                ended.append((job, FinishReason.LENGTH, None))
        for job, reason, matched in ended:
            self._end(job, reason, matched)

    def _denoise(self) -> None:
        """Generate the rest of the current block for every running request."""
        self._progress += 1
        for job in list(self._running.values()):
            length = len(job.request.token_ids) + job.generated
            wanted = min(BLOCK_TOKENS - length % BLOCK_TOKENS, job.left)
            block: list[int] = []
            while len(block) < wanted:
                job.token = (job.token + job.step) % self._config.vocab_size
                block.append(job.token)
                if job.token in job.stop_ids:
                    break
            job.generated += len(block)
            job.left -= len(block)
            job.sink.emit(block)
            if job.token in job.stop_ids:
                self._end(job, FinishReason.STOP, job.token)
            elif not job.left:
                self._end(job, FinishReason.LENGTH)

    def _end(self, job: _Job, reason: FinishReason, matched: int | None = None) -> None:
        self._release(job)
        job.end(reason, matched)

    def _release(self, job: _Job) -> None:
        """Remove a request from its stage and free its blocks."""
        engine_id = job.request.engine_id
        del self._jobs[engine_id]
        if job.stage is None and engine_id not in self._running:
            self._waiting.remove(job)
        else:
            self._used_blocks -= job.blocks
            self._running.pop(engine_id, None)
            if job.stage and job.stage is not asyncio.current_task():
                job.stage.cancel()
        self._admit()


def _logprob(token: int, top: int, vocab_size: int) -> TokenLogprob:
    ranked = tuple(((token + i) % vocab_size, _LOGPROB * (i + 1)) for i in range(top))
    return TokenLogprob(token, _LOGPROB, ranked)


def _prompt_logprobs(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, float("nan") if i == 0 else _LOGPROB)
        for i, token in enumerate(token_ids)
    )
