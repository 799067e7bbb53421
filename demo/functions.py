"""Draws practice dialogues with functions: a clock, a calculator, a weather service."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reading import Fields

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass
class Dialogue:
    """One conversation in the shape a chat template takes.

    Attributes:
        messages: assistant's messages have a `reasoning_content`, which the template leaves out
            unless the model is thinking.
        tools: the functions that are offered; an empty list: none, and the answer is learnt whole.
        thinking: whether the template is told to let the model think.
    """

    messages: list[Message]
    tools: list[Tool] | None = None
    thinking: bool = False


@dataclass
class Use:
    """One use of a function: asked for, called, and answered."""

    kind: str
    tool: Tool
    question: str
    arguments: dict[str, str]
    result: str
    answer: str
    thought: str

    @property
    def name(self) -> str:
        name: str = self.tool["function"]["name"]
        return name


class Functions:
    """Draws how functions are offered, called and answered."""

    def __init__(self, functions: Fields, weather: Fields, rng: random.Random) -> None:
        self._fields = functions
        self._weather = weather
        self._random = rng

    def drill(self) -> Dialogue:
        """Draws a dialogue that teaches nothing but to copy numbers and signs exactly."""
        rng = self._random
        asked, wanted = [], []
        signs = rng.random() < 0.6
        for _ in range(rng.choice((1, 1, 2)) if signs else rng.choice((1, 1, 2, 3, 5))):
            if signs or rng.random() < 0.3:
                expression, words = self._expression()
                asked.append(words if signs else expression)
                wanted.append(expression)
            else:
                roll = rng.random()
                item = self._time() if roll < 0.4 else _number(rng)
                item = made_up_word(rng).title() if roll > 0.92 else item
                asked.append(item)
                wanted.append(item)
        question = fill(self._one("signs" if signs else "repeat"), {"text": ", ".join(asked)})
        return Dialogue([message("user", question), message("assistant", ", ".join(wanted))], [])

    def digits(self, pairs: int) -> Dialogue:
        """Draws a dialogue that repeats so many pairs of digits, with nothing between them."""
        row = "".join(f"{self._random.randrange(100):02}" for _ in range(pairs))
        return Dialogue([message("user", f"Repeat: {row}"), message("assistant", row)], [])

    def uses(self) -> list[Use]:
        """Draws one use of each of one to three functions, which are then offered together."""
        both: list[Callable[[], Use]] = [self.clock, self.calculator]
        self._random.shuffle(both)
        one = [self.calculator if self._random.random() < 0.7 else self.clock]
        uses = [make() for make in self._random.choice((one, both))]
        if self._random.random() < 0.08:
            uses.append(self.weather(str))
            self._random.shuffle(uses)
        names = [use.name for use in uses]
        return uses if len(set(names)) == len(names) else uses[:1]

    def again(self, use: Use) -> Use:
        """Draws another use of the same function."""
        if use.kind == "weather":
            return use
        return self.clock(use.tool) if use.kind == "clock" else self.calculator(use.tool)

    def clock(self, tool: Tool | None = None) -> Use:
        """Draws a use of a clock, of ``tool`` if given."""
        time = self._time()
        tool = tool or self._tool("clock")
        return self._use("clock", tool, {}, {"time": time, "value": time})

    def calculator(self, tool: Tool | None = None) -> Use:
        """Draws a use of a calculator, of ``tool`` if given."""
        rng = self._random
        expression, words = self._expression()
        value = _value(*expression.split()) if rng.random() < 0.6 else _number(rng)
        draw = {"expression": expression, "words": words, "value": value}
        tool = tool or self._tool("calculator", self._one("calculator argument"))
        argument = next(iter(tool["function"]["parameters"]["properties"]))
        return self._use("calculator", tool, {argument: expression}, draw)

    def weather(self, ask: Callable[[str], str]) -> Use:
        """Draws a use of the weather service; ``ask`` roughens its question."""
        rng = self._random
        draw = {
            key: rng.choice(values if len(values) > 1 else values[0].split("|")).strip()
            for key, values in self._weather.items()
        }
        draw["degrees"] = str(rng.randint(-9, 39))
        for key in ("name", "argument", "place"):
            if rng.random() < 0.1:  # made-up ones can only be copied, not remembered
                draw[key] = made_up_word(rng)
        if rng.random() < 0.9:
            draw["place"] = draw["place"].title()
        return Use(
            kind="weather",
            tool=_tool(draw["name"], draw["description"], draw["argument"], rng),
            question=ask(fill(draw["question"], draw)),
            arguments={draw["argument"]: draw["place"]},
            result=fill(draw["result"], draw),
            answer=fill(draw["answer"], draw),
            thought=f"I need the weather, so I call {draw['name']}.",
        )

    def turn(self, use: Use) -> list[Message]:
        """Makes a turn in which the model calls a function and answers."""
        rng = self._random
        result, answer, thought = use.result, use.answer, self._one("thought result")
        if rng.random() < 0.05:
            draw = {"name": use.name, "number": str(rng.randint(1, 60))}
            result = _made_up(fill(rng.choice(self._fields["failure"]), draw), rng)
            answer, thought = self._one("failed"), self._one("thought failed")
        call = {"type": "function", "function": {"name": use.name, "arguments": use.arguments}}
        return [
            message("user", use.question),
            message("assistant", "", use.thought) | {"tool_calls": [call]},
            message("tool", result),
            message("assistant", answer, thought),
        ]

    def _time(self) -> str:
        return f"{self._random.randrange(24):02}:{self._random.randrange(60):02}"

    def _expression(self) -> tuple[str, str]:
        """Draws an expression of numbers up to 99, and what it is called."""
        rng = self._random
        sign = rng.choice("+-**")
        left, right = (rng.randrange(10 ** rng.choice((1, 2, 2, 2))) for _ in range(2))
        return f"{left} {sign} {right}", f"{left} {self._one(sign)} {right}"

    def _tool(self, kind: str, argument: str = "") -> Tool:
        name, description = self._one(f"{kind} name"), self._one(f"{kind} description")
        return _tool(name, description, argument, self._random)

    def _use(self, kind: str, tool: Tool, arguments: dict[str, str], draw: dict[str, str]) -> Use:
        rng = self._random
        draw["name"] = tool["function"]["name"]
        return Use(
            kind=kind,
            tool=tool,
            question=_spoken(fill(rng.choice(self._fields[f"{kind} question"]), draw), rng),
            arguments=arguments,
            result=fill(rng.choice(self._fields[f"{kind} result"]), draw),
            answer=fill(self._one(f"{kind} answer"), draw),
            thought=fill(self._one(f"{kind} thought"), draw),
        )

    def _one(self, key: str) -> str:
        values = self._fields[key]
        return self._random.choice(values if len(values) > 1 else values[0].split("|")).strip()


def message(role: str, content: str, thought: str = "") -> Message:
    """Makes a message; a thought is what the assistant thinks before it speaks."""
    made = {"role": role, "content": content}
    return made | {"reasoning_content": thought} if thought else made


def fill(text: str, values: Mapping[str, str]) -> str:
    """Puts values into the places `{key}`."""
    for key, value in values.items():
        text = text.replace("{" + key + "}", value)
    return text


def made_up_word(rng: random.Random) -> str:
    """Draws a word that can be said."""
    vowels, consonants = "aeiou", "".join(sorted(set(string.ascii_lowercase) - set("aeiou")))
    pairs = (rng.choice(consonants) + rng.choice(vowels) for _ in range(rng.randint(2, 4)))
    return "".join(pairs) + rng.choice(("", rng.choice(consonants)))


def _made_up(text: str, rng: random.Random) -> str:
    while "{word}" in text:
        text = text.replace("{word}", made_up_word(rng), 1)
    return text


def _spoken(question: str, rng: random.Random) -> str:
    """Roughens a question, and leaves its numbers as they are."""
    if rng.random() < 0.15:
        opener = rng.choice(("Hi,", "Hello.", "Please:", "Tell me:", "Okay.", "Quick question:"))
        question = f"{opener} {question}"
    if rng.random() < 0.1:
        question = f"{question} {rng.choice(('Thanks.', 'Thank you!', 'Please.'))}"
    if rng.random() < 0.3:
        question = question[:1].lower() + question[1:]
    return question.rstrip("?.! ") if rng.random() < 0.25 else question


def _value(left: str, sign: str, right: str) -> str:
    a, b = int(left), int(right)
    return str({"+": a + b, "-": a - b, "*": a * b}[sign])


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10 ** rng.choice((1, 2, 3, 4))) * rng.choice((1, 1, 1, 1, 1, 1, -1)))


def _tool(name: str, description: str, argument: str, rng: random.Random) -> Tool:
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    if argument:
        kind: dict[str, Any] = {"type": "string"}
        if rng.random() < 0.3:
            kind["description"] = f"The {argument}"
        parameters["properties"][argument] = kind
        if rng.random() < 0.7:
            parameters["required"] = [argument]
    if rng.random() < 0.2:
        parameters["additionalProperties"] = False
    function = {"name": name, "description": description, "parameters": parameters}
    if rng.random() < 0.1:
        function["description"] = ""
    # Both spellings are common; JSON text differs in its order only.
    tool = {"type": "function", "function": function}
    shuffled: dict[str, Any] = json.loads(json.dumps(tool, sort_keys=rng.random() < 0.3))
    return shuffled
