"""A deterministic engine: predictable tokens, a timing model, a KV cache with prefixes.

With a model's tokenizer it says a sentence (`engines.simulated.speech`). Otherwise the rule is:
every token is the one before plus one, modulo the vocabulary; the first follows the prompt's last.
Prompt [7, 41] gives 42, 43, 44, … A token equal to ``eos_token_id`` (if set) or to a
stop token ends it. So a request continued on another worker, with the tokens so far in its prompt,
gives the same tokens. All logprobs are -0.5; the alternatives are the next token ids. Images and
videos change the step from one token to the next, and so do other weight versions than
the first, and adapters (`engines.simulated.state`).

In the role DIFFUSION it plays a diffusion language model: the same tokens, but a step brings the
rest of a block of `BLOCK_TOKENS`, where the blocks begin with the prompt.

Each data-parallel rank has its own queue, step loop and KV cache (`engines.simulated.rank`). Blocks
stay cached after their request's end, for other requests with the same prefix
(`engines.simulated.prefix_cache`); prefill takes time for the other tokens only. KV blocks with
placeholders of media are named by the media's digests.

It is part of the package: for contract tests, scale tests and routing studies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from millstream_server.control.engine import EngineLoad, LoadProgress, LoadStage, Role
from millstream_server.engines.gate import Hold
from millstream_server.engines.simulated import transfer as simulated_transfer
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.controls import SimulatedControls
from millstream_server.engines.simulated.job import Job
from millstream_server.engines.simulated.rank import Rank
from millstream_server.engines.simulated.state import EngineState
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, OutputSink
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.sampling import Ability, Sampling
from millstream_server.generation.validation import REFUSED_IN_DIFFUSION
from millstream_server.kv_cache.events import KvEventSink
from millstream_server.runtime.errors import EngineFailedError, InvalidRequestError, ServingError

__all__ = ["SimulatedConfig", "SimulatedEngine"]

_ABILITIES = frozenset(Ability) - {Ability.CONSTRAINTS, Ability.STRUCTURAL_TAGS}
FILES = 10
FILE_BYTES = 1 << 30


class Loading:
    """Takes ``load_s`` seconds, and says how far it is."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._stage = LoadStage.STARTING
        self._files_done = 0

    def progress(self) -> LoadProgress:
        return LoadProgress(
            stage=self._stage,
            files_done=self._files_done,
            files_total=FILES,
            bytes_done=self._files_done * FILE_BYTES,
            bytes_total=FILES * FILE_BYTES,
        )

    async def load(self) -> None:
        self._stage = LoadStage.LOADING_WEIGHTS
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        for file in range(1, FILES + 1):
            due_s = began_s + self._load_s * file / FILES
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            self._files_done = file
        self._stage = LoadStage.PREPARING


class SimulatedEngine:
    """Satisfies `GeneratorEngine`, `kv_cache.events.KvEventSource` and `LoadObserved`."""

    def __init__(self, config: SimulatedConfig) -> None:
        self._config = config
        self._state = EngineState(config.weight_version)
        self._ranks = [Rank(config, i, self._state.ended) for i in range(config.dp_size)]
        self._loading = Loading(config.load_s)
        self._bootstrap: simulated_transfer.Bootstrap | None = None
        self.controls = SimulatedControls(config, self._state, self._ranks).offered()
        """See `engines.simulated.controls`."""

    def load_progress(self) -> LoadProgress:
        return self._loading.progress()

    def follow_kv(self, sink: KvEventSink) -> None:
        for dp_rank, rank in enumerate(self._ranks):
            rank.cache.follow(partial(sink.changed, dp_rank))

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        config = self._config
        await self._loading.load()
        port = 0
        if config.role is Role.PREFILL:
            self._bootstrap = simulated_transfer.Bootstrap()
            try:
                port = await self._bootstrap.listen(config.bootstrap_host, config.bootstrap_port)
            except OSError as error:
                raise EngineFailedError(
                    "the bootstrap port can't be bound; is it taken?"
                ) from error
        for rank in self._ranks:
            rank.bootstrap = self._bootstrap
            rank.steps.start()
        diffusion = config.role is Role.DIFFUSION
        return GeneratorInfo(
            engine="simulated",
            engine_version="1",
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            block_size=config.block_size,
            total_blocks=config.total_blocks * config.dp_size,
            max_running_requests=config.max_running_requests,
            dp_size=config.dp_size,
            weight_version=self._state.weight_version,
            abilities=frozenset() if diffusion else _ABILITIES,
            refused_fields=REFUSED_IN_DIFFUSION if diffusion else frozenset(),
            bootstrap_host=config.bootstrap_host if port else "",
            bootstrap_port=port,
            kv_transfer=simulated_transfer.way(config) if config.role.hands_off else None,
            media=config.media,
            takes_adapters=not diffusion,
            tells_kv=True,
        )

    async def warm_up(self) -> None:
        """Generate one token on each rank, in any role without a peer."""
        for dp_rank in range(self._config.dp_size):
            await self.probe(dp_rank)

    def progress(self, dp_rank: int) -> int:
        return self._ranks[dp_rank].progress

    async def probe(self, dp_rank: int) -> None:
        """Generate one token in the rank's step loop, in any role without a hand-off."""
        sink = CollectingSink()
        request = GenerationRequest(
            prompt=Prompt((1,)), sampling=Sampling(max_new_tokens=1), dp_rank=dp_rank
        )
        self.submit(request, sink)
        try:
            await sink.result()
        finally:
            self.abort(request.engine_id)

    def wedge(self, dp_rank: int | None = None) -> None:
        """Simulate a hang: requests are accepted and aborted, without output or failures."""
        for rank in self._ranks if dp_rank is None else [self._ranks[dp_rank]]:
            rank.gate.close(Hold.HANGS)

    def unwedge(self) -> None:
        for rank in self._ranks:
            rank.gate.release(Hold.HANGS)

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Queue a request. While it runs it holds blocks for its longest possible length."""
        size = len(self._ranks)
        error = self._state.refusal(request)
        if request.dp_rank is not None and not 0 <= request.dp_rank < size:
            sentence = f"{request.dp_rank} is not one of the {size} ranks (0 to {size - 1})"
            error = InvalidRequestError.of("dp_rank", sentence)
        if error is not None:
            sink.fail(error)
            return
        state = self._state
        job = Job(request, sink, self._config, state.weight_version, state.shift_of(request))
        self._rank_of(request).submit(job)

    def _rank_of(self, request: GenerationRequest) -> Rank:
        """Choose the rank that a request or its ticket names, else the one with fewest requests."""
        if request.dp_rank is not None:
            return self._ranks[request.dp_rank]
        if request.ticket is not None and self._config.role is Role.PREFILL:
            named = request.ticket.prefill_dp_rank or 0
            return self._ranks[min(named, len(self._ranks) - 1)]
        return min(self._ranks, key=lambda rank: rank.open_requests)

    def abort(self, engine_id: str) -> None:
        """Stop a request at any stage; its blocks are free on return."""
        for rank in self._ranks:
            if rank.abort(engine_id):
                return

    async def load(self) -> EngineLoad:
        ranks = [rank.load() for rank in self._ranks]
        total = sum(rank.total_blocks for rank in ranks)
        return EngineLoad.of_ranks(ranks, open_requests=0, total_blocks=total)

    async def close(self) -> None:
        for rank in self._ranks:
            rank.fail_all(lambda: EngineFailedError("the engine was closed"))
        if self._bootstrap:
            await self._bootstrap.close()
        for rank in self._ranks:
            await rank.steps.close()
