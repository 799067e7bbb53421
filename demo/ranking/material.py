"""Reads the texts of both rankers and draws practice pairs from them.

A pair is a query and the passage it belongs to. The everyday topics stand in `everyday.txt`, what
is said about Millstream in `../corpus/`. The format is described in README.md.
"""

from __future__ import annotations

import random
import re
import string
import sys
from dataclasses import dataclass, field
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))
from held_out import FRESH, GUIDING
from reading import plain_form, read_corpus

HERE = Path(__file__).resolve().parent
MISSPELT = 0.08
TEMPLATES = (
    "{x}",
    "{x}?",
    "What is {x}?",
    "Tell me about {x}.",
    "Explain {x}.",
    "How does {x} work?",
    "What do you know about {x}?",
    "I want to know more about {x}.",
    "Where can I find {x}?",
    "a text about {x}",
    "I am looking for {x}",
    "Why {x}?",
    "How do I {x}?",
    "Can you help me with {x}?",
)
FRAMES = (
    "This is about {x}.",
    "We talk about {x}.",
    "Here you read about {x}.",
    "{x}.",
    "An article on {x}.",
    "There is much to say about {x}.",
    "Everything on {x} in one place.",
    "He told us about {x}.",
    "The subject is {x}, and nothing else.",
)
OPENERS = ("Please:", "Hi,", "Can you tell me:", "Quick question:", "I wonder,", "Hello,", "So,")
STOP_WORDS = """
    a an the is are was were be been to of in on at by for from with and or not no it its that
    this these those as so than then there here he she they we you i my your his her their our
    me him them us do does did done has have had can could should would will may must one two
    what which who when where why how if because but more most much many some any all each every
    very only also too into out up down over under about after before while until through
"""  # of questions and passages: they say nothing about the subject

_SMALL = STOP_WORDS.split()
_STOPS = frozenset(_SMALL)


@dataclass(frozen=True)
class Passage:
    """A passage and what asks for it.

    Attributes:
        topic: passages of one topic are about similar things.
        text: the passage.
        questions: those that are practised.
        tests: those that are kept out of the practice.
    """

    topic: str
    text: str
    questions: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pair:
    """One practice pair.

    Attributes:
        query: what is looked for.
        passage: a text that belongs to it.
        topic: of both; empty when the words are random.
        loose: whether the query belongs to the topic as a whole and not to this passage alone.
    """

    query: str
    passage: str
    topic: str
    loose: bool


@dataclass
class Material:
    """Everything that was read: passages, and the words of the everyday topics."""

    passages: list[Passage] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)

    def texts(self) -> list[str]:
        """Every piece of text, for training the tokenizer."""
        found = [text for x in self.passages for text in (x.text, *x.questions)]
        found += [word for words in self.words.values() for word in words]
        return found + list(TEMPLATES) + list(FRAMES) + list(OPENERS)


# --- reading -------------------------------------------------------------------------------------


def read_material() -> Material:
    """Reads everyday topics and the corpus on Millstream; its held-out questions become tests."""
    everyday = read_topics(HERE / "everyday.txt")
    return Material(everyday.passages + _millstream(), everyday.words)


def read_topics(path: Path) -> Material:
    """Reads a topic file; raises ValueError with the line's number where it is not understood."""
    material = Material()
    topic = ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        key, _, value = line.partition(": ")
        last = material.passages[-1] if material.passages else None
        if line.startswith("## "):
            topic = line[3:].strip()
        elif key == "words":
            material.words[topic] = [word.strip() for word in value.split("|")]
        elif key == "P":
            material.passages.append(Passage(topic, value))
        elif key in {"Q", "T"} and last is not None:
            questions = last.questions + ((value,) if key == "Q" else ())
            tests = last.tests + ((value,) if key == "T" else ())
            material.passages[-1] = Passage(last.topic, last.text, questions, tests)
        elif line.strip() and not line.startswith("#"):
            message = f"{path.name}:{number}: expected words, P, Q or T, then ': ', got {line!r}"
            raise ValueError(message)
    return material


def _millstream() -> list[Passage]:
    """The answers of the chat corpus as passages, with the ways of asking for them."""
    probes = [x for x in GUIDING + FRESH if len(x.questions) == 1 and not x.system and not x.tools]
    held_out = {plain_form(probe.questions[0]) for probe in probes}
    topics = read_corpus(HERE.parent / "corpus").topics
    # A question whose answer stands in several passages would have several right answers.
    homes = {
        probe.expect: [x.name for x in topics if probe.expect in x.turns[0].answer]
        for probe in probes
    }
    passages = []
    for topic in topics:
        turn = topic.turns[0]
        questions = [x for x in turn.questions if plain_form(x) not in held_out]
        tests = [probe.questions[0] for probe in probes if homes[probe.expect] == [topic.name]]
        name = f"millstream {topic.name}"
        passages.append(Passage(name, turn.answer, tuple(questions), tuple(tests)))
    return passages


# --- drawing -------------------------------------------------------------------------------------


class Practice:
    """Draws random pairs; the same seed draws the same ones."""

    def __init__(self, material: Material, seed: int) -> None:
        """Prepares the draw from what `read_material` returned."""
        self._random = random.Random(seed)
        self._passages = [passage for passage in material.passages if passage.questions]
        self._words = material.words
        self._by_topic: dict[str, list[Passage]] = {}
        for passage in self._passages:
            self._by_topic.setdefault(passage.topic, []).append(passage)
        self._pool = sorted({word for text in material.texts() for word in content_words(text)})

    def pair(self) -> Pair:
        """Draws one pair: a real question, keywords of a passage, words of a topic, any words."""
        rng = self._random
        roll = rng.random()
        if roll < 0.18:
            return self._topic_pair()
        if roll < 0.40:
            return self._word_pair()
        passage = rng.choice(self._passages)
        if roll < 0.52:
            words = content_words(passage.text)
            chosen = sorted(rng.sample(range(len(words)), min(len(words), rng.randint(1, 4))))
            query = rng.choice(TEMPLATES).replace("{x}", " ".join(words[at] for at in chosen))
            return Pair(query, passage.text, passage.topic, loose=len(chosen) < 2)
        query = self.roughen(rng.choice(passage.questions))
        if roll < 0.60:
            return Pair(query, rng.choice(passage.questions), passage.topic, loose=False)
        return Pair(query, passage.text, passage.topic, loose=False)

    def roughen(self, question: str) -> str:
        """Changes a question as people do: an opener, a word left out, a misspelling."""
        rng = self._random
        words = question.split(" ")
        if len(words) > 4 and rng.random() < 0.25:
            del words[rng.randrange(len(words))]
        if rng.random() < 0.15:
            words.insert(0, rng.choice(OPENERS))
        text = " ".join(words)
        if rng.random() < MISSPELT:
            at = rng.randrange(len(text))
            text = text[:at] + text[at + 1 :]
        return text.rstrip("?.! ") if rng.random() < 0.3 else text

    def _topic_pair(self) -> Pair:
        """Words of a topic: for one of its passages, or for other words of it."""
        rng = self._random
        topic = rng.choice(list(self._words))
        words = rng.sample(self._words[topic], min(6, len(self._words[topic])))
        asked = rng.randint(1, 2)
        query = rng.choice(TEMPLATES).replace("{x}", " ".join(words[:asked]))
        if rng.random() < 0.5:
            passage = rng.choice(self._by_topic[topic]).text
        else:
            passage = rng.choice(FRAMES).replace("{x}", _listed(words[asked:]))
        return Pair(query, passage, topic, loose=True)

    def _word_pair(self) -> Pair:
        """Any words at all, so that shared words count even where they are new."""
        rng = self._random
        words = [self._any_word() for _ in range(rng.randint(2, 8))]
        shared = [self._inflected(word) for word in words[: rng.randint(1, 3)]]
        rng.shuffle(words)
        if rng.random() < 0.5:
            passage = rng.choice(FRAMES).replace("{x}", _listed(words))
        else:
            passage = " ".join(part for word in words for part in (rng.choice(_SMALL), word))
        query = rng.choice(TEMPLATES).replace("{x}", self._joined(shared))
        return Pair(query, passage, "", loose=False)

    def _any_word(self) -> str:
        """A known word, two halves of known words, or letters."""
        rng = self._random
        roll = rng.random()
        if roll < 0.4:
            return rng.choice(self._pool)
        if roll < 0.85:
            left, right = rng.choice(self._pool), rng.choice(self._pool)
            return left[: rng.randint(2, 5)] + right[-rng.randint(2, 5) :]
        return "".join(rng.choice(string.ascii_lowercase) for _ in range(rng.randint(3, 8)))

    def _inflected(self, word: str) -> str:
        rng = self._random
        return word + rng.choice(("s", "ed", "ing", "er")) if rng.random() < 0.2 else word

    def _joined(self, words: list[str]) -> str:
        rng = self._random
        return " ".join(
            f"{rng.choice(_SMALL)} {word}" if rng.random() < 0.3 else word for word in words
        )


def content_words(text: str) -> list[str]:
    """The words of a text that say something, in order and in lower case."""
    return [word for word in re.findall(r"[\w-]+", text.lower()) if word not in _STOPS]


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))
