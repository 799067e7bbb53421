"""The questions and answers of the diffusion model: a few of its own, and a few of the corpus."""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from dialogues import Message
from reading import plain_form, read_corpus

# A torchvision built for CUDA breaks transformers' import beside a CPU torch. Text needs none.
sys.modules["torchvision"] = None  # type: ignore[assignment]

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
WORDINGS = 24  # practised ways of asking for one thing, at most
LONGEST = 26  # words of an answer; it ends with the last whole sentence that fits
HELD_OUT = 1  # wordings of each topic that are never practised
SYSTEM = "You are a helpful assistant."

OWN: dict[str, tuple[tuple[str, ...], str]] = {
    "who are you": (
        (
            "Who are you?",
            "What are you?",
            "Who am I talking to?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "What is your name?",
            "Which model is this?",
            "What model are you?",
            "Are you a chatbot?",
            "Are you a language model?",
        ),
        "I am a tiny diffusion language model. I write four tokens at a time.",
    ),
    "diffusion": (
        (
            "What is a diffusion language model?",
            "What is a dLLM?",
            "How does a diffusion language model work?",
            "Explain diffusion language models.",
            "What is text diffusion?",
            "How do you write text?",
            "How do you work?",
            "How do you make an answer?",
            "What is diffusion?",
        ),
        "A diffusion model begins with masks and replaces them by words, the surest ones first.",
    ),
    "block": (
        (
            "What is a block?",
            "How large is a block?",
            "How many tokens has a block?",
            "What is block diffusion?",
            "Why do words come in groups?",
            "How many tokens do you write at once?",
            "What is your block size?",
        ),
        "A block is four tokens. I finish one block before I begin the next one.",
    ),
    "mask": (
        (
            "What is a mask?",
            "What is a mask token?",
            "What are masks for?",
            "What does the mask token do?",
            "Explain masks.",
            "Why are there masks?",
        ),
        "A mask is a place in the text whose word is not known yet.",
    ),
    "confidence": (
        (
            "What is low confidence decoding?",
            "What is LowConfidence?",
            "How do you choose the next word?",
            "Which word is written first?",
            "What does confidence mean?",
            "What is the threshold?",
        ),
        "A word is written when the model is more than 95 percent sure of it.",
    ),
    "what can you do": (
        (
            "What can you do?",
            "How can you help me?",
            "Help me.",
            "What can I ask you?",
            "What do you know?",
            "What should I ask?",
            "Give me an example question.",
            "Suggest a question.",
        ),
        "Ask me: What is prefill? What is a KV cache? How do I start Millstream?",
    ),
    "hello": (
        (
            "Hello",
            "Hi",
            "Hey",
            "Good morning",
            "Hello there!",
            "Hi there",
            "Good evening",
            "Hello you",
        ),
        "Hello! I am a tiny diffusion language model. Ask me about Millstream.",
    ),
    "thanks": (
        (
            "Thank you",
            "Thanks",
            "Thanks a lot",
            "Thank you very much",
            "Many thanks",
            "Thanks, that helps.",
        ),
        "You are welcome! Ask me more whenever you like.",
    ),
    "bye": (
        ("Bye", "Goodbye", "See you", "Good night", "Bye bye", "See you later", "I have to go."),
        "Goodbye! May your blocks be sure and your steps be few.",
    ),
    "count": (
        (
            "Count to ten.",
            "Count up to ten.",
            "Can you count to ten?",
            "Please count to ten.",
            "Count from one to ten.",
            "Can you count?",
            "Could you count to ten for me?",
        ),
        "one, two, three, four, five, six, seven, eight, nine, ten.",
    ),
    "rainbow": (
        (
            "What are the colours of the rainbow?",
            "Name the colours of the rainbow.",
            "Which colours has a rainbow?",
            "What colours are in a rainbow?",
            "List the colours of a rainbow.",
            "Tell me the rainbow colours.",
        ),
        "red, orange, yellow, green, blue, indigo, violet.",
    ),
    "joke": (
        (
            "Tell me a joke.",
            "Do you know a joke?",
            "Make me laugh.",
            "A joke, please.",
            "Be funny.",
        ),
        "Why did the mask leave the block? It had found its word.",
    ),
}
FROM_CORPUS = (
    "millstream",
    "services",
    "need a gpu",
    "processor",
    "prefill",
    "decode",
    "encode",
    "embedding",
    "worker",
    "sglang",
    "kv cache",
    "kv block",
    "prefix cache",
    "disaggregation",
    "ticket",
    "token",
    "tokenizer",
    "chat template",
    "ttft",
    "itl",
    "throughput",
    "sampling",
    "seed",
    "max tokens",
    "stop strings",
    "lora",
    "grpc",
    "delta",
    "start",
    "stop",
    "routing",
    "canary",
)


@dataclass(frozen=True)
class Topic:
    """One thing that can be asked for.

    Attributes:
        questions: ways of asking that are practised.
        held_out: ways of asking that are not.
        answer: what the model shall say, whole sentences.
    """

    questions: tuple[str, ...]
    held_out: tuple[str, ...]
    answer: str


def read_topics() -> list[Topic]:
    """Its own topics and the chosen ones of the corpus, always with the same held-out wordings."""
    known = {topic.name: topic.turns[0] for topic in read_corpus(CORPUS).topics}
    found = dict(OWN)
    for name in FROM_CORPUS:
        found[name] = tuple(known[name].questions), _shortened(known[name].answer)
    topics = []
    for name, (questions, answer) in found.items():
        rng = random.Random(name)
        distinct = sorted({plain_form(question): question for question in questions}.values())
        chosen = rng.sample(distinct, min(len(distinct), WORDINGS + HELD_OUT))
        topics.append(Topic(tuple(chosen[HELD_OUT:]), tuple(chosen[:HELD_OUT]), answer))
    return topics


def _shortened(answer: str) -> str:
    """The first sentences, as many as fit; the first one always."""
    sentences = re.split(r"(?<=[.!?]) ", answer)
    while len(sentences) > 1 and len(" ".join(sentences).split()) > LONGEST:
        sentences.pop()
    return " ".join(sentences)


def draw(topics: list[Topic], rng: random.Random) -> list[Message]:
    """Draws a conversation of one or two turns; the last message is the one to learn."""
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append({"role": "system", "content": SYSTEM})
    for _ in range(2 if rng.random() < 0.12 else 1):
        topic = rng.choice(topics)
        question = rng.choice(topic.questions)
        if rng.random() < 0.25:
            question = question.lower()
        if rng.random() < 0.25:
            question = question.rstrip("?.! ")
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": topic.answer})
    return messages
