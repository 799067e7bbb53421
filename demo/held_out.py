"""Questions that are never practised, to see what the model makes of new words; raw prompts."""

import random
from dataclasses import dataclass
from typing import Any

WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


@dataclass(frozen=True)
class Probe:
    """A conversation whose last question was held out of the practice.

    Attributes:
        questions: what the user says, turn by turn.
        expect: a phrase of the right last answer.
        system: the system message, if any.
        tools: functions offered to the model, if any.
    """

    questions: tuple[str, ...]
    expect: str
    system: str = ""
    tools: tuple[dict[str, Any], ...] = ()


# Looked at while the corpus was written: a few of its paraphrases were added because of these.
GUIDING = (
    Probe(("In one sentence, what is Millstream about?",), "suite of small gRPC services"),
    Probe(("Could you tell me who you are?",), "demo model"),
    Probe(("hello, nice to meet you",), "Hello! I am"),
    Probe(("What exactly does prefill do?",), "whole prompt at once"),
    Probe(("Please teach me what the decode phase does.",), "one new token at a time"),
    Probe(("So what is this KV cache everyone talks about?",), "keys and values"),
    Probe(("What is the Processor responsible for?",), "front door"),
    Probe(("What's inside the ticket?",), "bootstrap host and port"),
    Probe(("What is this bootstrap room thing?",), "63-bit"),
    Probe(("Can you tell me how I get Millstream started?",), "make up"),
    Probe(("How do I talk with the model in my terminal?",), "millstream chat"),
    Probe(("How could I debug one of the services?",), "grpcurl"),
    Probe(
        ("What happens to my answer when its worker suddenly dies?",), "neither a gap nor a repeat"
    ),
    Probe(("What does the abbreviation TTFT stand for?",), "time to first token"),
    Probe(("Tell me the difference of TTFT and ITL.",), "ITL is the time between"),
    Probe(("How do I abort a running request?",), "three ways"),
    Probe(("How can I check that a worker is healthy?",), "grpc.health.v1"),
    Probe(("Why did you choose gRPC instead of REST?",), "Because gRPC"),
    Probe(("How does the router choose a worker?",), "filter"),
    Probe(("Which metrics can Prometheus read?",), "9464"),
    Probe(("Is it okay to run this without any GPU?",), "CPU"),
    Probe(("Could you count up to twenty, please?",), "nineteen, twenty"),
    Probe(("I would love to hear a story",), "Once upon a time"),
    Probe(("Who is the king of Sweden?",), "tiny demo model"),
    Probe(("How do I bake cookies?",), "tiny demo model"),
    Probe(("What is a stop string good for?",), "ends the answer"),
    Probe(("What is prefill?", "And what about decode?"), "one new token at a time"),
    Probe(("What is a hand-off ticket?", "Why do you need that?"), "cache of another request"),
    Probe(("Hi", "How do I start it?", "And how do I stop everything?"), "Control C"),
    Probe(("What is SGLang used for here?",), "Arr, matey!", system="You are a pirate."),
    Probe(("So what are tokens, then?",), "piece of text", system="You are a helpful assistant."),
    Probe(("Is it cold in Paris?",), '"get_weather"', tools=(WEATHER_TOOL,)),
)

# Written after the corpus; nothing was changed because of them.
FRESH = (
    Probe(("I just cloned the repository, how do I bring up the whole thing?",), "make up"),
    Probe(("Who does the tokenizing in this system?",), "front door"),
    Probe(("Is the KV cache kept on the GPU?",), "blocks of memory"),
    Probe(("Do the prefill and decode legs start at the same time?",), "both at the same time"),
    Probe(("How long is a room number?",), "63-bit"),
    Probe(("Which port do the metrics listen on?",), "9464"),
    Probe(("What will the client notice if its decode worker crashes?",), "gap"),
    Probe(("What do I do with grpcurl?",), "reflection"),
    Probe(("How can I stop generating after a certain phrase?",), "stop string"),
    Probe(("What is the latency between tokens called?",), "inter-token"),
    Probe(("Do I have to install etcd for this?",), "no message bus"),
    Probe(("Can you count from 1 up to 20?",), "twenty"),
    Probe(("Give me one haiku about water.",), "Water finds its way"),
    Probe(("What is the recipe for tomato soup?",), "tiny demo model"),
    Probe(("Who was the first man on the moon?",), "tiny demo model"),
    Probe(("thanks, that was helpful!",), "welcome"),
    Probe(("When does a worker become ready?",), "SERVING"),
    Probe(("Which engine is used to run the models?",), "SGLang is a fast engine"),
    Probe(("What does max_tokens do?",), "limits how many"),
    Probe(("How is a request routed to a worker?",), "filter"),
    Probe(("Why should prefill and decode be on different workers?",), "long prompt"),
    Probe(("What do step frames carry?",), "columns"),
    Probe(("Are answers sent token by token or all at once?",), "delta"),
    Probe(("Can Millstream produce embeddings for my documents?",), "vectors"),
    Probe(("What are your limitations?",), "toy"),
    Probe(("How many parameters has this model got?",), "six million"),
    Probe(("Where can I find the docs?",), "README"),
    Probe(("Does it work with images?",), "vision tower"),
    Probe(("What happens when I send SIGTERM to a worker?",), "NOT_SERVING"),
    Probe(("Is a ticket reusable?",), "used once"),
)


@dataclass(frozen=True)
class Loop:
    """A question that is answered with the result of a function."""

    question: str
    name: str
    arguments: dict[str, str]
    result: str
    answer: str
    thinking: bool


TOOLS = tuple(
    {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }
    for name, description, parameters in (
        ("clock", "Tell the time.", {"type": "object", "properties": {}}),
        (
            "calculate",
            "Work out an expression, such as 6 * 7.",
            {
                "type": "object",
                "properties": {"expression": {"type": "string"}},
                "required": ["expression"],
            },
        ),
    )
)


def _loops() -> tuple[Loop, ...]:
    """Make twenty of each, half of them with reasoning; the numbers are of a fixed seed."""
    rng = random.Random(28)
    made = []
    for number in range(20):
        thinking = number % 2 > 0
        time = f"{rng.randrange(24):02}:{rng.randrange(60):02}"
        made.append(Loop("What time is it?", "clock", {}, time, f"It is {time}.", thinking))
        left, right = rng.randrange(2, 100), rng.randrange(2, 100)
        value, expression = str(left * right), f"{left} * {right}"
        question, called = f"What is {left} times {right}?", {"expression": expression}
        said = f"It is {value}."
        made.append(Loop(question, "calculate", called, value, said, thinking))
    return tuple(made)


LOOPS = _loops()

# Raw prompts, without the chat template, and a phrase of how they go on. The practice cuts the same
# texts in many places; the last three begin as none of them does.
RAW = (
    ("Millstream is", "suite of small gRPC services"),
    ("Prefill is the first", "step of inference"),
    ("Decode is", "second step of inference"),
    ("The Processor is", "front door"),
    ("The KV cache", "keys and values"),
    ("A token is a", "piece of text"),
    ("SGLang is", "fast engine"),
    ("Routing has three", "steps"),
    ("Once upon a time", "small stream"),
    ("What is prefill?", "first step of inference"),
    ("My cat likes", "do not know how to go on"),
    ("The largest city of Finland is", "do not know how to go on"),
    ("import numpy as np", "do not know how to go on"),
)
