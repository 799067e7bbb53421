"""What clients of a simulated suite ask for, as messages, and which tokens answer it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.v1 import chat_pb2, processor_pb2, sampling_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import VOCAB_SIZE
from tests.support.simulation.engine import Drawn, Machine, spoken
from tests.support.writing import WRITERS

MODEL = "m"
PENALTY = 0.5
GRAMMAR = "[a-z]*"
FORMATS = ("hermes", "qwen-xml", "glm-kv", "deepseek-v3.1", "olmo3")
"""Of models that a run may have: reasoning, and calls as JSON, elements, pairs and Python."""


@dataclass(frozen=True)
class Knobs:
    """How tokens are drawn, and what comes back."""

    tokens: int = 20
    n: int = 1
    random: bool = False
    seed: int | None = None
    penalty: bool = False
    grammar: bool = False
    logprobs: bool = False
    prompt_logprobs: bool = False
    stop: str = ""
    min_tokens: int = 0
    ignore_eos: bool = True
    diffusion: bool = False
    """For a diffusion language model, which takes no sampling."""

    def to_proto(self) -> processor_pb2.GenerationOptions:
        sampling = sampling_pb2.SamplingParams(max_new_tokens=self.tokens)
        if not self.diffusion:
            sampling.temperature = 1.0 if self.random else 0.0
        if self.ignore_eos:
            sampling.ignore_eos = True
        if self.seed is not None:
            sampling.seed = self.seed
        if self.penalty:
            sampling.frequency_penalty = PENALTY
        if self.grammar:
            sampling.constraint.regex = GRAMMAR
        if self.min_tokens:
            sampling.min_new_tokens = self.min_tokens
        options = processor_pb2.GenerationOptions(sampling=sampling, return_token_ids=True)
        if self.n > 1:
            options.n = self.n
        if self.logprobs:
            options.logprobs.CopyFrom(
                sampling_pb2.LogprobOptions(top=1, prompt=self.prompt_logprobs)
            )
        if self.stop:
            options.stop.append(self.stop)
        return options


@dataclass(frozen=True, kw_only=True)
class Manner:
    """How a client behaves."""

    at_s: float = 1.0
    cancel_after_s: float | None = None
    deadline_s: float | None = None
    read_pause_s: float = 0.0
    """A slow reader waits so long after each message."""
    library: bool = False
    """It uses the Python client, which goes on at another Processor."""
    processor: int = 0
    """Where it begins, modulo how many there are."""


@dataclass(frozen=True, kw_only=True)
class Completion(Manner):
    """A prompt of token ids."""

    prompt: tuple[int, ...]
    knobs: Knobs = field(default_factory=Knobs)

    def to_proto(self) -> processor_pb2.CompleteRequest:
        message = processor_pb2.CompleteRequest(model=MODEL, options=self.knobs.to_proto())
        message.token_ids.ids.extend(self.prompt)
        return message

    def course(self, machine: Machine, text: TextModel) -> Course:
        return Course(self.knobs, machine, text, len(self.prompt), behind=self.prompt)


@dataclass(frozen=True)
class Turn:
    """A question, which says what the answer is."""

    text: str
    thinking: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Names, and the value of the one argument."""
    cancel_after_s: float | None = None
    """The client sends CancelTurn, unless the turn has ended before."""

    def written(self, form: str) -> str:
        """Return the answer as the model writes it."""
        calls = [(name, {"s": value}) for name, value in self.calls]
        return WRITERS[form].write(self.thinking, self.text, calls)

    def question(self, form: str) -> str:
        return f"say {json.dumps(self.written(form))}"


@dataclass(frozen=True, kw_only=True)
class Chat(Manner):
    """A conversation in one stream."""

    turns: tuple[Turn, ...]
    knobs: Knobs = field(default_factory=Knobs)
    events: bool = True

    def start(self, form: str) -> processor_pb2.ChatStart:
        names = sorted({name for turn in self.turns for name, _ in turn.calls})
        return processor_pb2.ChatStart(
            model=MODEL,
            messages=[user(self.turns[0].question(form))],
            tools=[chat_pb2.ChatTool(name=name, parameters_json_schema=SCHEMA) for name in names],
            options=self.knobs.to_proto(),
            output=processor_pb2.CHAT_OUTPUT_EVENTS
            if self.events
            else processor_pb2.CHAT_OUTPUT_TEXT,
        )


SCHEMA = '{"type":"object","properties":{"s":{"type":"string"}}}'


def user(text: str) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER, content=[chat_pb2.ContentPart(text=text)]
    )


@dataclass(frozen=True)
class Said:
    """A message of a conversation, as a model's template renders it."""

    role: str
    text: str
    thinking: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """Names and arguments."""


def template(form: str) -> str:
    """Return the chat template of a model that writes in a format: an answer stands behind @."""
    opened, closed = WRITERS[form].thinking.split("%s")
    return (
        "{% for m in messages %}{{ m.role }}{{ '@' if m.role == 'assistant' else ':' }}"
        f"{{% if m.reasoning_content %}}{{{{ {opened!r} + m.reasoning_content + {closed!r} }}}}"
        "{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
        "{% if not loop.last or add_generation_prompt %}|{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}assistant@{% endif %}"
    )


def rendered(messages: Sequence[Said], form: str) -> str:
    """Return the prompt of a conversation, as `template` makes it."""
    opened, closed = WRITERS[form].thinking.split("%s")
    parts = []
    for said in messages:
        thinking = f"{opened}{said.thinking}{closed}" if said.thinking else ""
        calls = "".join(f"[{name} {arguments}]" for name, arguments in said.calls)
        sign = "@" if said.role == "assistant" else ":"
        parts.append(f"{said.role}{sign}{thinking}{said.text}{calls}|")
    return "".join(parts) + "assistant@"


class Course:
    """The right tokens of an answer, one by one, and its right end."""

    def __init__(
        self,
        knobs: Knobs,
        machine: Machine,
        text: TextModel,
        prompt_tokens: int,
        *,
        behind: Sequence[int] = (),
        says: str | None = None,
    ) -> None:
        """The answer counts on from the prompt that it is ``behind``, or it ``says`` a text."""
        self.knobs = knobs
        self.prompt_tokens = prompt_tokens
        self.text = text
        self.told = None if says is None else spoken(text, json.dumps(says))
        self._machine = machine
        self.behind = behind
        self._lies = 0
        self._ends = () if knobs.ignore_eos else text.eos_token_ids

    def wrong(self, index: int, tokens: Sequence[int], *, lies: int = 0) -> str:
        """Return what is wrong with the tokens of a choice, of which more may come; else ""."""
        before = self.behind[-1] if self.behind else 0
        for place, token in enumerate(tokens):
            right = self._next(index, place, before, lies)
            if token not in right:
                return f"token {place} of choice {index} is {token}, not one of {right}"
            before = token
            if place + 1 < len(tokens) and self.end(tokens[: place + 1]):
                return f"choice {index} has {len(tokens)} tokens, and {place + 1} end it"
        return ""

    def _next(self, index: int, place: int, before: int, lies: int) -> list[int]:
        if self.told is not None:
            return [self.told[min(place, len(self.told) - 1)]]
        knobs = self.knobs
        seed = None if knobs.seed is None else knobs.seed + index
        rule = Drawn(knobs.random, seed, knobs.penalty, knobs.grammar)
        start = self.prompt_tokens if self._machine.by_position else 0
        steps = rule.steps(start + place, place)
        return [(before + step + lies) % VOCAB_SIZE for step in steps]

    def end(self, tokens: Sequence[int]) -> tuple[str, int | str | None] | None:
        """Return why and by what a choice with these tokens has ended; None: more must come."""
        knobs = self.knobs
        if knobs.stop and tokens and knobs.stop in self.text.decode(list(tokens)):
            return "STOP", knobs.stop
        if tokens and tokens[-1] in self._ends and len(tokens) >= knobs.min_tokens:
            return "STOP", tokens[-1]
        return ("LENGTH", None) if len(tokens) >= knobs.tokens else None


def tokens_of(messages: Sequence[Said], form: str) -> int:
    """Return how many tokens the prompt of a conversation has: a byte is one."""
    return len(rendered(messages, form).encode())
