"""What a worker needs of an inference engine; every adapter satisfies it structurally.

Plain dataclasses only: neither protobuf nor a vendor's types cross this line. Why output is pushed
into a sink and not pulled from an iterator per request: docs/adr/0001-engines-push.md.
"""

from __future__ import annotations

import asyncio
import enum
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from millstream_server.runtime.errors import ServingError


class Role(enum.Enum):
    """Which half of generation a worker does."""

    AGGREGATED = "aggregated"
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(enum.Enum):
    """Why a generation ended, in the contract's words."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Ability(enum.Enum):
    """A feature an engine may lack, depending on the vendor and on how it was started."""

    SEED = "seed"
    MIN_NEW_TOKENS = "min_new_tokens"
    CONSTRAINTS = "constraints"
    LOGIT_BIAS = "logit_bias"
    PROMPT_LOGPROBS = "prompt_logprobs"


class ConstraintKind(enum.Enum):
    """The grammar languages of guided decoding."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"


@dataclass(frozen=True, slots=True)
class Constraint:
    """Output must match this grammar."""

    kind: ConstraintKind
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the next token is drawn and when to stop. Defaults are neutral, never a model's own."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Ask for the chosen tokens' logprobs, the `top` likeliest, and the prompt's."""

    top: int = 0
    prompt: bool = False


@dataclass(frozen=True, slots=True)
class KvHandoff:
    """Where prefill and decode meet: the part of a verified ticket that an engine needs.

    ``room`` is below 2**63 and never used twice.
    """

    bootstrap_host: str
    bootstrap_port: int
    room: int
    prefill_dp_rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One tokenised prompt and how to continue it.

    ``engine_id`` is ours: 32 random hex digits from `new_engine_id`, never a client's string
    (SGLang aborts by id *prefix*). ``trace_headers`` are W3C traceparent and tracestate.
    """

    engine_id: str
    token_ids: Sequence[int]
    sampling: Sampling
    logprobs: LogprobOptions | None = None
    handoff: KvHandoff | None = None
    trace_headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Logprob (natural log) of one token; ``top`` are (token id, logprob), likeliest first.

    The first prompt token has no logprob: NaN.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """The one terminal report of a request that did not fail. Token counts are exact."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    matched_token_id: int | None = None
    """The EOS or stop token that ended it; it is the last token emitted."""
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What a started engine is."""

    engine: str
    """Vendor name, as in `gen_ai.provider.name`: "sglang", "simulated"."""
    engine_version: str
    vocab_size: int
    context_length: int
    """Prompt plus completion, in tokens."""
    block_size: int
    """Tokens per KV block."""
    total_blocks: int
    max_running_requests: int
    dp_size: int = 1
    weight_version: str = ""
    abilities: frozenset[Ability] = frozenset()
    bootstrap_host: str = ""
    """Prefill engines only: where a decode engine asks for KV cache."""
    bootstrap_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is at this moment."""

    running_requests: int
    queued_requests: int
    used_blocks: int
    total_blocks: int


class OutputSink(Protocol):
    """Where an engine puts one request's output.

    Called on the event loop that called `submit`; never blocks, never raises. Any number of `emit`,
    then exactly one of `finish` or `fail`, then nothing. Aborted requests get `finish` too
    (CANCELLED), once the engine has let go of them.
    """

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Take one or more new tokens, disjoint from all before; a logprob each when asked for."""
        ...

    def finish(self, finish: Finish) -> None:
        """Take the terminal report."""
        ...

    def fail(self, error: ServingError) -> None:
        """Take the terminal failure, already translated."""
        ...


class Engine(Protocol):
    """Lifecycle and token generation.

    Order of calls: `start`, `warm_up`, any number of `submit`/`abort`/`load` in any order, `close`.
    All calls come from one event loop. `close` may be called twice and after a failed `start`.
    """

    async def start(self, on_failure: Callable[[ServingError], None]) -> EngineInfo:
        """Load the model without blocking the event loop.

        ``on_failure`` is called at most once, when the engine dies later on; every open request has
        been failed by then. The worker then leaves: a dead engine is not revived in place.

        Raises:
            EngineFailedError: it could not be loaded.
        """
        ...

    async def warm_up(self) -> None:
        """Run one minimal request down the path this engine's role serves.

        Raises:
            EngineFailedError: it failed or took longer than the engine's warm-up limit.
        """
        ...

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        """Start a request; returns at once. Everything that goes wrong goes to the sink.

        The caller has checked the request against `EngineInfo` (`engines.validation`).
        """
        ...

    def abort(self, engine_id: str) -> None:
        """Stop a request at any stage, before the first token too; unknown ids are ignored."""
        ...

    async def load(self) -> EngineLoad:
        """Report how busy the engine is."""
        ...

    async def close(self) -> None:
        """Release everything; open requests fail."""
        ...


class Probeable(Protocol):
    """Shows, from start to close, whether an engine still works (`worker.canary`).

    ``dp_rank`` is below `EngineInfo.dp_size`: one rank can hang while the others go on.
    """

    def progress(self, dp_rank: int) -> int:
        """Give a number that changes whenever the rank gets on with anybody's request.

        Neither blocks nor asks the rank. It may miss work, but never tells of work not done.
        """
        ...

    async def probe(self, dp_rank: int) -> None:
        """Run one minimal request on a rank, down the path this engine's role serves.

        It queues behind real requests and has no limit of its own: cancel it to abort the request,
        which takes effect at once even when the engine doesn't answer. One at a time per rank.

        Raises:
            ServingError: it failed.
        """
        ...


def new_engine_id() -> str:
    """Make a request id for an engine: 128 random bits in 32 hex digits."""
    return secrets.token_hex(16)


class CollectingSink:
    """A sink that gathers one request's output; for warm-ups, canaries and tests."""

    def __init__(self) -> None:
        """Start empty."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self._changed = asyncio.Event()
        self._result: asyncio.Future[Finish] = asyncio.get_running_loop().create_future()

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        """Gather."""
        self.token_ids.extend(token_ids)
        self.logprobs.extend(logprobs)
        self._changed.set()

    def finish(self, finish: Finish) -> None:
        """End well."""
        if self._result.done():
            message = "the engine reported two terminal results for one request"
            raise RuntimeError(message)
        self._result.set_result(finish)
        self._changed.set()

    def fail(self, error: ServingError) -> None:
        """End badly."""
        if self._result.done():
            message = "the engine reported two terminal results for one request"
            raise RuntimeError(message)
        self._result.set_exception(error)
        self._changed.set()

    async def result(self) -> Finish:
        """Wait for the end.

        Raises:
            ServingError: the request failed.
        """
        return await asyncio.shield(self._result)

    async def first_token(self) -> int:
        """Wait for the first token.

        Raises:
            ServingError: the request failed before one came.
        """
        while not self.token_ids:
            if self._result.done():
                finish = self._result.result()
                message = f"the request ended ({finish.reason.value}) before its first token"
                raise RuntimeError(message)
            self._changed.clear()
            await self._changed.wait()
        return self.token_ids[0]
