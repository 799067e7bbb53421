"""The functions that the demo model has learnt to call, and one run of its tool loop."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass

from millstream_client import Client, TextPiece

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
SPOKEN = {"+": "plus", "-": "minus", "*": "times"}
CITIES = ("Paris", "London", "Berlin", "Cairo", "Lima", "Delhi", "Shanghai", "Seattle", "Dublin")
"""Some that the model can spell."""
SKIES = ("sunny", "cloudy")


@dataclass(frozen=True)
class Use:
    """A question, the call that it needs, the call's result, and what the answer has to hold."""

    question: str
    name: str
    arguments: dict[str, str]
    result: str
    said: str


def clock(draw: random.Random) -> Use:
    """Draw a time that a clock shall show."""
    time = f"{draw.randrange(24):02}:{draw.randrange(60):02}"
    return Use("What time is it?", "clock", {}, time, f"It is {time}.")


def calculator(draw: random.Random) -> Use:
    """Draw a calculation with numbers up to 99."""
    left, right, sign = draw.randrange(2, 100), draw.randrange(2, 100), draw.choice("+-*")
    value = str(SIGNS[sign](left, right))
    question = f"What is {left} {SPOKEN[sign]} {right}?"
    expression = {"expression": f"{left} {sign} {right}"}
    return Use(question, "calculate", expression, value, f"It is {value}.")


def weather(draw: random.Random) -> Use:
    """Draw a city, and a sky for it."""
    city, sky = draw.choice(CITIES), draw.choice(SKIES)
    question, result = f"What is the weather in {city}?", f"{sky}, 17 degrees"
    return Use(question, "get_weather", {"city": city}, result, f"and {sky} in {city}.")


USES: dict[str, Callable[[random.Random], Use]] = {
    "clock": clock,
    "calculator": calculator,
    "weather": weather,
}


@dataclass(frozen=True)
class Outcome:
    """What came of a loop."""

    wrong: str
    """What went otherwise than it should; empty if nothing did."""
    pieces: int
    """In how many pieces the answer's text came."""


async def run_loop(client: Client, use: Use, *, reasoning: bool) -> Outcome:
    """Ask, run the function that is called, and read the answer as it comes.

    Args:
        client: of a Processor that serves the demo model.
        use: what is asked for.
        reasoning: whether the model is told to think; it has to before each answer, or never.
    """
    called: list[tuple[str, dict[str, str]]] = []

    def returns(name: str, **arguments: str) -> str:
        called.append((name, arguments))
        return use.result

    def clock() -> str:
        """Tell the time."""
        return returns("clock")

    def calculate(expression: str) -> str:
        """Work out an expression, such as 6 * 7."""
        return returns("calculate", expression=expression)

    def get_weather(city: str) -> str:
        """Get the weather."""
        return returns("get_weather", city=city)

    offered: list[Callable[..., str]] = [clock, calculate]
    tools = [get_weather] if use.name == "get_weather" else offered
    stream = client.chat(use.question, tools=tools, temperature=0, reasoning=reasoning)
    run = stream.run_tools()
    pieces = [event.text async for event in run if isinstance(event, TextPiece)]
    text, thoughts = "".join(pieces), [answer.reasoning for answer in run.answers]
    good = called == [(use.name, use.arguments)] and use.said in text
    good = good and [bool(thought) for thought in thoughts] == [reasoning] * 2
    seen = f"{use.question!r}: called {called}, said {text!r}, thought {thoughts}"
    return Outcome("" if good else seen, len(pieces))
