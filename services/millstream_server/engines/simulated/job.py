"""One request in the simulated engine: its tokens, its KV blocks, its end."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256

from millstream_server.control.engine import Role
from millstream_server.engines.simulated import state
from millstream_server.engines.simulated.adapter import SimulatedConfig
from millstream_server.engines.simulated.prefix_cache import HeldBlocks
from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.generation.ticket import EngineData
from millstream_server.kv_cache.hashing import Namespace, further_hashes

_LOGPROB = -0.5
_WORDS = struct.Struct("<8I")


class Job:
    """One request: queue → prefill → (transfer) → decode.

    See the head of `engines.simulated.engine` for its tokens.
    """

    def __init__(
        self,
        request: GenerationRequest,
        sink: OutputSink,
        config: SimulatedConfig,
        weight_version: str,
        shift: int,
    ) -> None:
        """``shift`` is what weights and adapter add to the step between its tokens."""
        sampling, prompt = request.sampling, request.prompt
        self.request = request
        self.sink = sink
        self.config = config
        self.weight_version = weight_version
        self.shift = shift
        self.stop_ids = set(sampling.stop_token_ids)
        if config.eos_token_id is not None and not sampling.ignore_eos:
            self.stop_ids.add(config.eos_token_id)
        self.token = request.token_ids[-1]
        """The last token."""
        self._speech: Iterator[int] | None = None
        self._said: list[int] = []
        """What it has said, where it doesn't count."""
        self.limit = 1 if config.role is Role.PREFILL else sampling.max_new_tokens
        """How many tokens it generates at most."""
        self.blocks = -(-(len(request.token_ids) + self.limit) // config.block_size)
        """KV blocks for its longest possible length."""
        self.step = 1 + shift + state.of_digests(prompt.media) + state.of_tensors(prompt.media)
        """What is added to a token for the next one."""
        self.generated = 0
        self.stage: asyncio.Task[None] | None = None
        """The running prefill or transfer."""
        self.logprobs_top = request.logprobs.top if request.logprobs else None
        self.held: HeldBlocks | None = None
        """None: it is queued."""
        self.cached_tokens = 0
        self.prefilled = False
        """Whether the prompt has been computed."""
        self.hashes: list[int] = []
        """Of the first full blocks; `hashes_of` adds to them."""
        self.digest = Namespace(request.adapter, request.cache_salt).digest()
        """Of the last of these."""
        self.prompt_ids = _prompt_ids(prompt)
        """The prompt as its KV blocks are named."""
        self.engine_data: EngineData | None = None
        """Prefill: what the decode engine gets."""

    def advance(self) -> int:
        """Return the next token."""
        speech = self.config.speech
        if speech is None:
            self.token = (self.token + self.step) % self.config.vocab_size
        else:
            if self._speech is None:  # not before: media's tensors add to the step
                self._speech = speech.tokens(self.request.token_ids, self.step - 1)
            self.token = next(self._speech)
            self._said.append(self.token)
        self.generated += 1
        return self.token

    def hashes_of(self, tokens: int) -> list[int]:
        """Return the hashes of the full blocks of its first tokens, the output's included."""
        size = self.config.block_size
        done = len(self.hashes) * size
        if tokens - done >= size:
            further, self.digest = further_hashes(self.digest, self._ids(done, tokens), size)
            self.hashes += further
        return self.hashes[: tokens // size]

    def _ids(self, start: int, end: int) -> Sequence[int]:
        prompt = self.prompt_ids
        if end <= len(prompt):
            return prompt[start:end]
        if self.config.speech is not None:
            said = self._said[max(start - len(prompt), 0) : end - len(prompt)]
            return said if start >= len(prompt) else [*prompt[start:], *said]
        last, size, step = self.request.token_ids[-1], self.config.vocab_size, self.step
        first = last + step * (max(start - len(prompt), 0) + 1)
        ids: Sequence[int] = range(first, last + step * (end - len(prompt)) + 1, step)
        if ids[-1] >= size:
            ids = [token % size for token in ids]
        return ids if start >= len(prompt) else [*prompt[start:], *ids]

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and the output so far."""
        return len(self.prompt_ids) + self.generated

    @property
    def computed_tokens(self) -> int:
        """Tokens that have KV: all but the last one generated."""
        return len(self.prompt_ids) + max(self.generated - 1, 0) if self.prefilled else 0

    def end(self, reason: FinishReason, matched: int | None = None) -> None:
        request = self.request
        prompt = request.logprobs is not None and request.logprobs.prompt
        self.sink.finish(
            Finish(
                reason=reason,
                prompt_tokens=len(request.token_ids),
                completion_tokens=self.generated,
                cached_tokens=self.cached_tokens,
                media_tokens=request.prompt.media_tokens,
                matched_token_id=matched,
                prompt_logprobs=_prompt_logprobs(request.token_ids) if prompt else (),
                weight_version=self.weight_version,
                engine_data=self.engine_data,
            )
        )


def logprob(token: int, top: int, vocab_size: int) -> TokenLogprob:
    """Return the logprob of a generated token."""
    ranked = tuple(((token + i) % vocab_size, _LOGPROB * (i + 1)) for i in range(top))
    return TokenLogprob(token, _LOGPROB, ranked)


def _prompt_logprobs(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(token, float("nan") if i == 0 else _LOGPROB)
        for i, token in enumerate(token_ids)
    )


def _prompt_ids(prompt: Prompt) -> Sequence[int]:
    """Put numbers of a media item in place of its placeholders, so that blocks differ by it."""
    if not prompt.media:
        return prompt.token_ids
    ids = list(prompt.token_ids)
    for item in prompt.media:
        words = _WORDS.unpack(sha256(item.digest).digest())
        for span in item.spans:
            ids[span.start : span.start + span.length] = [words[i % 8] for i in range(span.length)]
    return ids
