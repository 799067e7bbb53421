"""Draws what the new layers of grow.py learn from."""

from __future__ import annotations

import argparse
import random
from collections import defaultdict
from collections.abc import Callable

from dialogues import Practice
from functions import Dialogue, Functions, Message, message
from held_out import FRESH, GUIDING
from reading import plain_form, read_corpus
from train import Pair, encode, encode_raw, hurried
from transformers import PreTrainedTokenizerFast

ROWS = {1: 24, 3: 24, 8: 20, 16: 16}
"""How many rows of so many pairs of digits a step has."""
LONGEST = {"drill": 400, "tools": 560, "chat": 160, "raw": 150, "thought": 200, "self": 250}
LONGEST |= {"same chat": 90, "same raw": 160, "weather": 320}
NEW = "six million"
"""Stands in what the model says of its size, which isn't that of the old one."""


class Lessons:
    """Draws what a step learns from: rows of several kinds, each with the weight of its loss."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, options: argparse.Namespace) -> None:
        """Reads the corpus; the same seed draws the same rows."""
        corpus = read_corpus(options.corpus)
        held_out = {plain_form(probe.questions[-1]) for probe in GUIDING + FRESH}
        self._random = random.Random(options.seed)
        self._tokenizer = tokenizer
        self._unknown = f" {corpus.plain['unknown'][0]}"
        self._functions = Functions(corpus.functions, corpus.tools, self._random)
        self._chats, self._tools, self._drills = (
            Practice(corpus, options.seed + at, held_out, tools, drill)
            for at, (tools, drill) in enumerate(((0, 0), (1, 0), (0, 1)))
        )
        self._waiting: dict[tuple[str, int], list[list[Pair]]] = defaultdict(list)
        self._kinds: dict[str, Callable[[], Pair]] = {
            "drill": lambda: self._encoded(self._drills),
            "tools": lambda: self._encoded(self._tools),
            "chat": self._chat,
            "raw": self._raw,
            "self": self._self,
            "same chat": self._mixed,
            "same raw": lambda: encode_raw(self._raw_text(), tokenizer),
            "thought": self._thought,
            "weather": self._weather,
        }

    def copying(self, step: int) -> dict[str, tuple[list[Pair], float]]:
        """Draws rows that copy digits, and a few of other kinds so that they aren't lost."""
        pairs = self._random.choice(tuple(ROWS))
        drawn = {f"digits {pairs}": (self._digits(pairs, ROWS[pairs]), 1.0)}
        other = self._random.choice(("chat", "raw"))
        drawn[other] = self._rows(other, 4), 0.7
        if step % 3 == 0:
            drawn["tools"] = self._rows("tools", 1), 0.5
        return drawn

    def calling(self, step: int) -> dict[str, tuple[list[Pair], float]]:
        """Draws rows of all kinds, most weight on calls."""
        drawn = {"tools": (self._rows("tools", 6), 3.0), "thought": (self._rows("thought", 3), 1.0)}
        drawn["same chat"] = self._rows("same chat", 12), 2.0
        drawn["raw"] = self._rows("raw", 3), 0.7
        if step % 2:
            drawn["drill"] = self._rows("drill", 3), 0.7
            drawn["weather"] = self._rows("weather", 2), 0.7
        else:
            pairs = self._random.choice(tuple(ROWS))
            drawn[f"digits {pairs}"] = self._digits(pairs, 3), 0.5
            other = ("chat", "self", "same raw")[step // 2 % 3]
            drawn[other] = self._rows(other, 4), 0.7
        return drawn

    def _rows(self, kind: str, count: int) -> list[Pair]:
        """Takes rows of about the same length, so that little is wasted on padding."""
        waiting = self._waiting[kind, count]
        if not waiting:
            rows: list[Pair] = []
            while len(rows) < 8 * count:
                row = self._kinds[kind]()
                if len(row[0]) <= LONGEST[kind]:
                    rows.append(row)
            rows.sort(key=lambda row: len(row[0]))
            waiting += [rows[at : at + count] for at in range(0, len(rows), count)]
            self._random.shuffle(waiting)
        return waiting.pop()

    def _digits(self, pairs: int, count: int) -> list[Pair]:
        drawn = (self._functions.digits(pairs) for _ in range(count))
        return [encode(dialogue, self._tokenizer) for dialogue in drawn]

    def _encoded(self, practice: Practice) -> Pair:
        return encode(practice.dialogue(), self._tokenizer)

    def _chat(self) -> Pair:
        dialogue = self._chats.dialogue()
        dialogue.thinking = False
        pair = encode(dialogue, self._tokenizer)
        return pair if self._random.random() > 0.75 else hurried(*pair)

    def _thought(self) -> Pair:
        """Draws a chat with a thought before each answer."""
        dialogue = self._chats.dialogue()
        dialogue.thinking = True
        return encode(dialogue, self._tokenizer)

    def _weather(self) -> Pair:
        """Draws a question about the weather, which a function answers."""
        use = self._functions.weather(str)
        return encode(Dialogue(self._functions.turn(use), [use.tool]), self._tokenizer)

    def _raw(self) -> Pair:
        """Draws a text to go on with; one in four is of the words of two, which nobody can."""
        rng = self._random
        (text, rest), (other, _) = (self._chats.raw_text() for _ in range(2))
        if rng.random() < 0.25:
            text, rest = " ".join(self._blend(text.split(), other.split())), self._unknown
        return encode_raw((text, rest), self._tokenizer)

    def _raw_text(self) -> tuple[str, str]:
        while NEW in "".join(text := self._chats.raw_text()):
            pass
        return text

    def _self(self) -> Pair:
        """Draws a chat about the model, of which the new layers make a larger one."""
        while NEW not in (dialogue := self._chats.dialogue()).messages[-1]["content"]:
            pass
        return encode(Dialogue(dialogue.messages), self._tokenizer)

    def _blend(self, words: list[str], others: list[str]) -> list[str]:
        """Puts some words of two texts together."""
        rng = self._random
        if rng.random() < 0.5:
            return words[: max(1, len(words) // 2)] + others[len(others) // 2 :]
        return [word for word in words + others if rng.random() < 0.6] or words

    def _mixed(self) -> Pair:
        """Draws a question, mostly of the words of two, and how an answer begins."""
        rng = self._random
        drawn = self._chats.dialogue()
        (question, said), (other, _) = _exchange(drawn), _exchange(self._chats.dialogue())
        if NEW in said["content"]:
            return self._mixed()
        words, others = (text["content"].split() for text in (question, other))
        if rng.random() > 0.35:
            words = self._blend(words, others)
        system = [text for text in drawn.messages[:1] if text["role"] == "system"]
        dialogue = Dialogue([*system, message("user", " ".join(words)), said])
        ids, labels = hurried(*encode(dialogue, self._tokenizer))
        return ids[: -rng.randint(1, 7)], labels


def _exchange(dialogue: Dialogue) -> tuple[Message, Message]:
    """Returns the first question and the first answer."""
    question, said = (
        next(text for text in dialogue.messages if text["role"] == role)
        for role in ("user", "assistant")
    )
    return question, said
