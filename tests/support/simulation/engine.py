"""The engine of simulated suites: each token shows what the engine was told, and what it wasn't.

It is the simulated engine with other tokens. Its rule can be worked out by hand (`Drawn`):

- A token is the one before plus one, modulo the vocabulary.
- Above temperature 0 a number of 0 to 2 is added, which follows from the seed and the token's
  position. An engine that doesn't draw by position, as vLLM, counts from the request's prompt.
- Penalties and grammars add a number that follows from how many tokens are *output*: those of this
  request, and those that the engine was told to be (`resumed_tokens`).
- A prompt that has `say "TEXT"`, TEXT as in JSON, before its last `@` is answered with TEXT and the
  end's token. It goes on behind what stands after the `@`; with penalties or a grammar behind what
  it was told to be output: an engine's grammar begins anew with any prompt.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from millstream_server.control.engine import Role
from millstream_server.engines.simulated.engine import SimulatedConfig, SimulatedEngine
from millstream_server.engines.simulated.job import logprob
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import Finish, FinishReason, OutputSink, TokenLogprob
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Ability
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.errors import EngineFailedError, ServingError
from millstream_testing.alphabet import VOCAB_SIZE

DRAWS = 3
"""A draw is a number below this one."""
_SAY = re.compile(r'say ("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True)
class Machine:
    """What the workers' engines are like."""

    vendor: str = "simulated"
    seeds: bool = True
    resumes: bool = True
    """They can be told which tokens are output."""
    grammars: bool = True

    @property
    def by_position(self) -> bool:
        return self.vendor != "vllm"

    def abilities(self, all_of_them: frozenset[Ability]) -> frozenset[Ability]:
        has = {
            Ability.SEED: self.seeds,
            Ability.RESUMED_OUTPUT: self.resumes,
            Ability.CONSTRAINTS: self.grammars,
            Ability.STRUCTURAL_TAGS: self.grammars,
        }
        return all_of_them - {ability for ability, offered in has.items() if not offered}


@dataclass(frozen=True)
class Drawn:
    """The rule of a request's tokens, where it isn't told to say a text."""

    random: bool = False
    seed: int | None = None
    penalty: bool = False
    grammar: bool = False

    def steps(self, position: int, output: int) -> list[int]:
        """Return what may be added for the next token: at ``position``, ``output`` came before."""
        fixed = 1 + (output % 5 if self.penalty else 0) + (output % 2 if self.grammar else 0)
        if not self.random:
            return [fixed]
        if self.seed is None:
            return [fixed + draw for draw in range(DRAWS)]
        return [fixed + zlib.crc32(b"%d %d" % (self.seed, position)) % DRAWS]


class TellingEngine(SimulatedEngine):
    """See the head of this file."""

    def __init__(self, config: SimulatedConfig, machine: Machine, text: TextModel) -> None:
        super().__init__(config)
        self._machine = machine
        self._text = text
        (self._end,) = text.eos_token_ids
        self.lies = 0
        """What it adds to each token that comes with logprobs: no honest engine would."""
        self._on_failure: Callable[[ServingError], None] = lambda _: None

    async def start(self, on_failure: Callable[[ServingError], None]) -> GeneratorInfo:
        self._on_failure = on_failure
        info = await super().start(on_failure)
        if info.abilities:
            info = replace(info, abilities=self._machine.abilities(frozenset(Ability)))
        return replace(info, engine=self._machine.vendor)

    def die(self) -> None:
        """Fail as an engine whose process has died."""
        error = EngineFailedError("the engine's process has died")
        for rank in self._ranks:
            rank.fail_all(lambda: error)
        self._on_failure(error)

    def submit(self, request: GenerationRequest, sink: OutputSink) -> None:
        sampling = request.sampling
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {self._end})
        tokens: list[int] = []
        matched: int | None = None
        for token in self._tokens(request):
            tokens.append(token)
            if token in ends and len(tokens) >= sampling.min_new_tokens:
                matched = token
                break
            if len(tokens) >= sampling.max_new_tokens:
                break
        changed = replace(
            sampling,
            max_new_tokens=len(tokens),
            min_new_tokens=0,
            ignore_eos=True,
            stop_token_ids=(),
        )
        super().submit(replace(request, sampling=changed), _Telling(sink, tokens, matched, request))

    def _tokens(self, request: GenerationRequest) -> Iterator[int]:
        """Yield what it generates, without end."""
        text = self._said(request)
        if text is not None:
            yield from text
            while True:
                yield self._end
        sampling, prompt = request.sampling, request.prompt.token_ids
        rule = Drawn(
            random=sampling.temperature > 0 and self._config.role is not Role.DIFFUSION,
            seed=sampling.seed,
            penalty=_penalized(request),
            grammar=sampling.constraint is not None,
        )
        token, output = prompt[-1], request.resumed_tokens
        position = len(prompt) if self._machine.by_position else 0
        lie = self.lies if request.logprobs is not None else 0
        while True:
            steps = rule.steps(position, output)
            step = steps[0] if len(steps) == 1 else random.choice(steps)
            token = (token + step + lie) % VOCAB_SIZE
            yield token
            position, output = position + 1, output + 1

    def _said(self, request: GenerationRequest) -> Sequence[int] | None:
        """Return what it says; None: it is told to say nothing."""
        ids = request.prompt.token_ids
        told, begun = told_in(self._text, tuple(ids))
        if told is None:
            return None
        if _penalized(request) or request.sampling.constraint is not None:
            return told[request.resumed_tokens :]
        if list(told[: len(begun)]) != list(begun):
            raise AssertionError(f"a prompt ends in {begun}, which isn't what it was told to say")
        return told[len(begun) :]


def _penalized(request: GenerationRequest) -> bool:
    return request.sampling.frequency_penalty != 0


class _Telling:
    """A sink in front of a request's own: in place of the engine's tokens come others."""

    def __init__(
        self,
        sink: OutputSink,
        tokens: Sequence[int],
        matched: int | None,
        request: GenerationRequest,
    ) -> None:
        self._sink = sink
        self._tokens = tokens
        self._matched = matched
        self._top = request.logprobs.top if request.logprobs else None
        self._given = 0

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        given = self._given
        self._given = given + len(token_ids)
        told = self._tokens[given : self._given]
        if self._top is None:
            self._sink.emit(told)
        else:
            self._sink.emit(told, [logprob(token, self._top, VOCAB_SIZE) for token in told])

    def finish(self, finish: Finish) -> None:
        if finish.reason is FinishReason.LENGTH and self._given and self._matched is not None:
            finish = replace(finish, reason=FinishReason.STOP, matched_token_id=self._matched)
        self._sink.finish(finish)

    def fail(self, error: ServingError) -> None:
        self._sink.fail(error)


@lru_cache(maxsize=256)
def told_in(text: TextModel, ids: tuple[int, ...]) -> tuple[Sequence[int] | None, Sequence[int]]:
    """Return what a prompt tells to say, its end included, and what stands behind its last @."""
    at = mark(text)
    if at not in ids:
        return None, ()
    place = len(ids) - 1 - ids[::-1].index(at)
    said = _SAY.findall(text.decode(ids[:place], skip_special_tokens=False))
    return (spoken(text, said[-1]) if said else None), ids[place + 1 :]


@lru_cache(maxsize=256)
def spoken(text: TextModel, quoted: str) -> tuple[int, ...]:
    ids = text.encode(json.loads(quoted), add_special_tokens=False)
    return (*ids, *text.eos_token_ids)


@lru_cache
def mark(text: TextModel) -> int:
    """Return the token of the `@` that stands before answers."""
    (token,) = text.encode("@", add_special_tokens=False)
    return int(token)
