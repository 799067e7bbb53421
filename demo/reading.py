"""Reads the text files in `corpus/`, which are written for people; README.md has their format."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Fields = dict[str, list[str]]

TOPIC_FILES = (
    "about.txt",
    "services.txt",
    "serving.txt",
    "contract.txt",
    "running.txt",
    "reliability.txt",
    "smalltalk.txt",
    "conversations.txt",
)


@dataclass
class Turn:
    """One exchange: every question here is answered by `answer`.

    Attributes:
        groups: the questions, by the way they were written: literal ones, and templates filled in.
        answer: what the model shall say.
    """

    groups: dict[str, list[str]]
    answer: str

    @property
    def questions(self) -> list[str]:
        """All questions of all groups."""
        return [question for group in self.groups.values() for question in group]


@dataclass
class Topic:
    """One section of a corpus file: a first turn, and what may follow it."""

    name: str
    turns: list[Turn]
    more: str | None = None
    why: str | None = None


@dataclass
class Corpus:
    """Everything that was read: topics, and the fields of the files that are not topics."""

    topics: list[Topic] = field(default_factory=list)
    templates: Fields = field(default_factory=dict)
    unknown: Fields = field(default_factory=dict)
    systems: Fields = field(default_factory=dict)
    tools: Fields = field(default_factory=dict)
    functions: Fields = field(default_factory=dict)
    plain: Fields = field(default_factory=dict)

    def texts(self) -> Iterator[str]:
        """Yields every piece of text, for training the tokenizer."""
        for topic in self.topics:
            for turn in topic.turns:
                yield from turn.questions
                yield turn.answer
            yield from filter(None, (topic.more, topic.why))
        parts = (self.templates, self.unknown, self.systems, self.tools, self.functions, self.plain)
        for fields in parts:
            for values in fields.values():
                yield from values


def read_corpus(folder: Path) -> Corpus:
    """Reads every file of the corpus; a line that is not understood raises ValueError."""
    corpus = Corpus(
        templates=_read_fields(folder / "templates.txt"),
        unknown=_read_fields(folder / "unknown.txt"),
        systems=_read_fields(folder / "systems.txt"),
        tools=_read_fields(folder / "tools.txt"),
        functions=_read_fields(folder / "functions.txt"),
        plain=_read_fields(folder / "texts.txt"),
    )
    for name in TOPIC_FILES:
        corpus.topics += _read_topics(folder / name, corpus.templates)
    _refuse_contradictions(corpus)
    return corpus


def _refuse_contradictions(corpus: Corpus) -> None:
    """Raises ValueError when one opening question has two answers."""
    known = {plain_form(question): ("unknown", "") for question in corpus.unknown["Q"]}
    for topic in corpus.topics:
        opening = topic.turns[0]
        for question in opening.questions:
            plain = plain_form(question)
            name, answer = known.setdefault(plain, (topic.name, opening.answer))
            if answer != opening.answer:
                message = f"{question!r} is answered by {name!r} and, otherwise, by {topic.name!r}"
                raise ValueError(message)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yields (key, value) of each `key: value` line; `## x` and `| x` have the mark as key."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("## "):
            yield "##", line[3:].strip()
        elif line.startswith("|"):
            yield "|", line[2:]
        elif line.strip() and not line.startswith("#"):
            key, colon, value = line.partition(":")
            if not colon:
                message = f"{path.name}:{number}: expected 'key: value', got {line!r}"
                raise ValueError(message)
            yield key.strip(), value.strip()


def _read_fields(path: Path) -> Fields:
    fields: Fields = defaultdict(list)
    for key, value in _lines(path):
        fields[key].append(value)
    return dict(fields)


def _read_topics(path: Path, templates: Fields) -> list[Topic]:
    topics: list[Topic] = []
    asking = False  # whether the line before was a question of the same turn
    for key, value in _lines(path):
        if key == "##":
            topics.append(Topic(value, []))
            asking = False
            continue
        topic = topics[-1]
        if key in {"Q", "about", "role", "do"} and not asking:
            topic.turns.append(Turn({}, ""))
            asking = True
        if key == "Q":
            topic.turns[-1].groups.setdefault(key, []).append(value)
        elif key in {"about", "role", "do"}:
            group = topic.turns[-1].groups.setdefault(key, [])
            group += _paraphrases(templates[key], value)
        elif key in {"more", "why"}:
            setattr(topic, key, value)
        elif key in {"A", "|"}:
            turn = topic.turns[-1]
            turn.answer = f"{turn.answer}\n{value}" if turn.answer else value
            asking = False
        else:
            message = f"{path.name}: unknown key {key!r} in section {topic.name!r}"
            raise ValueError(message)
    return topics


def _paraphrases(templates: list[str], subjects: str) -> list[str]:
    return [
        template.replace("{x}", subject.strip())
        for subject in subjects.split("|")
        for template in templates
    ]


def plain_form(question: str) -> str:
    """Lower case, letters and digits only: for asking whether two questions are the same."""
    return " ".join(re.findall(r"\w+", question.lower()))
