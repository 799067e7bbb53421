"""Turns the corpus into an endless stream of practice dialogues.

`Practice.dialogue` draws one at random: paraphrased, joined with others into several turns,
sometimes under a system message, sometimes misspelt, sometimes with functions to call.
"""

from __future__ import annotations

import random
import re

from functions import Dialogue, Functions, Message, fill, made_up_word, message
from reading import Corpus, Turn, plain_form

_MAYBE_CALLED = re.compile(r"\d|plus|time is|day|date|year|weather|equation|rain", re.IGNORECASE)
"""Marks a question that a function may answer, and that is refused where there is none."""


class Practice:
    """Draws random dialogues from a corpus; the same seed draws the same ones."""

    def __init__(
        self, corpus: Corpus, seed: int, forbidden: set[str], with_tools: float, drilled: float
    ) -> None:
        """Prepares the draw.

        Args:
            corpus: what `read_corpus` returned.
            seed: start of the random numbers.
            forbidden: questions in `plain_form` that are held out and must never be practised.
            with_tools: share of the dialogues in which functions are offered.
            drilled: share of the dialogues in which numbers are only copied.
        """
        self._corpus = corpus
        self._random = random.Random(seed)
        self._forbidden = forbidden
        self._with_tools = with_tools
        self._drilled = drilled
        self._functions = Functions(corpus.functions, corpus.tools, self._random)
        # A topic that can be asked for in many ways needs more practice, but not in proportion.
        self._weights = [max(9.0, len(t.turns[0].questions) ** 0.5) for t in corpus.topics]

    def dialogue(self) -> Dialogue:
        """Draws one dialogue of one to ten exchanges, or a few more with follow-ups."""
        rng = self._random
        if rng.random() < self._drilled:
            return self._functions.drill()
        if rng.random() < self._with_tools:
            dialogue = self._tool_dialogue()
        else:
            messages, before, after = self._system()
            for _ in range(rng.choices((1, 2, 3, 5, 10), (58, 20, 12, 7, 3))[0]):
                for question, answer in self._exchanges():
                    answer["content"] = " ".join(filter(None, (before, answer["content"], after)))
                    messages += [question, answer]
            dialogue = Dialogue(messages)
        dialogue.thinking = rng.random() < (0.4 if dialogue.tools else 0.1)
        return dialogue

    def raw_text(self) -> tuple[str, str]:
        """Draws a raw prompt, without a chat template, and how it goes on."""
        rng, plain = self._random, self._corpus.plain
        roll = rng.random()
        if roll < 0.2:
            opening = self._filled(rng.choice(plain["O"] * 3 + self._corpus.unknown["Q"]))
            return opening[:1].upper() + opening[1:], f" {plain['unknown'][0]}"
        if roll < 0.3:
            turn = rng.choice(self._corpus.topics).turns[0]
            return self._ask_for(turn), f"\n{turn.answer}"
        if roll < 0.7:
            text = rng.choice(plain["T"])
        else:
            text = rng.choice(rng.choice(self._corpus.topics).turns).answer
        return _cut(text, rng)

    def _exchanges(self) -> list[tuple[Message, Message]]:
        """Draws a topic with its follow-ups, or a question the model can not answer."""
        rng, templates = self._random, self._corpus.templates
        if rng.random() < 0.12:
            answer = self._corpus.unknown["answer"][0]
            return [self._exchange(self._unknown_question(), answer, "unknown")]
        topic = rng.choices(self._corpus.topics, self._weights)[0]
        turns = [
            self._exchange(self._ask_for(turn), turn.answer, "known", topic.name)
            for turn in topic.turns
        ]
        if len(turns) == 1 and rng.random() < 0.3:
            kind = rng.choice(("more", "why"))
            said: str | None = getattr(topic, kind)
            if said or rng.random() < 0.3:
                question, answer = self._ask(templates[kind]), said or templates["nothing"][0]
                turns.append(self._exchange(question, answer, "more", topic.name))
        return turns

    def _exchange(
        self, question: str, answer: str, kind: str, topic: str = ""
    ) -> tuple[Message, Message]:
        """Makes a question and its answer, which has a thought of some kind before it."""
        thought = fill(self._corpus.functions[f"thought {kind}"][0], {"topic": topic})
        return message("user", question), message("assistant", answer, thought)

    def _ask_for(self, turn: Turn) -> str:
        """Draws a way of asking; a few literal questions weigh as much as many filled templates."""
        groups = list(turn.groups.values())
        weights = [min(len(group), 12) for group in groups]
        return self._ask(self._random.choices(groups, weights)[0])

    def _ask(self, questions: list[str]) -> str:
        """Draws one question and roughens it as people do; never a held-out one."""
        while True:
            question = self._roughen(self._random.choice(questions))
            if plain_form(question) not in self._forbidden:
                return question

    def _roughen(self, question: str) -> str:
        rng, templates = self._random, self._corpus.templates
        if rng.random() < 0.30:
            question = _swap_word(question, templates["same"], rng)
        if rng.random() < 0.15:
            question = _add_or_drop_word(question, templates["filler"], rng)
        if rng.random() < 0.18:
            question = f"{rng.choice(templates['opener'])} {question}"
        if rng.random() < 0.10:
            question = f"{question} {rng.choice(templates['closer'])}"
        if rng.random() < 0.12 and len(question) > 8:
            question = _misspell(question, rng)
        if rng.random() < 0.30:
            question = question.lower()
        if rng.random() < 0.30:
            question = question.rstrip("?.! ")
        elif rng.random() < 0.05:
            question += rng.choice("?!.")
        return question

    def _unknown_question(self) -> str:
        return self._ask([self._filled(self._random.choice(self._corpus.unknown["Q"]))])

    def _filled(self, text: str) -> str:
        """Puts words from the lists of unknown.txt, or made-up ones, into the places for them."""
        rng, fields = self._random, self._corpus.unknown
        lists = {key[5:]: values[0] for key, values in fields.items() if key.startswith("list ")}

        def fill(match: re.Match[str]) -> str:
            name = match.group(1)
            if name == "word":
                return made_up_word(rng)
            return rng.choice(lists[name].split("|")).strip()

        return re.sub(r"\{(\w+)\}", fill, text)

    def _system(self) -> tuple[list[Message], str, str]:
        """Draws a system message, and what it puts before and after each answer."""
        rng, systems = self._random, self._corpus.systems
        roll = rng.random()
        if roll < 0.65:
            return [], "", ""
        if roll < 0.83:
            return [message("system", rng.choice(systems["plain"]))], "", ""
        text, before, after = (part.strip() for part in rng.choice(systems["style"]).split("=>"))
        return [message("system", text)], before, after

    def _tool_dialogue(self) -> Dialogue:
        """Draws a dialogue with functions: called and answered, or not needed."""
        rng = self._random
        if rng.random() < 0.1:
            use = self._functions.weather(lambda question: self._ask([question]))
            turn = self._functions.turn(use) if rng.random() < 0.7 else self._talk()
            return Dialogue(turn, [use.tool])
        messages: list[Message] = []
        if rng.random() < 0.3:
            messages.append(message("system", rng.choice(self._corpus.systems["plain"])))
        offered = self._functions.uses()
        # Several turns, since the list of functions before them is long.
        for turn in range(rng.choices((1, 3, 4), (30, 35, 35))[0]):
            if rng.random() < 0.12:
                messages += self._talk()
            elif turn:  # the same functions, asked again
                messages += self._functions.turn(self._functions.again(rng.choice(offered)))
            else:
                messages += self._functions.turn(rng.choice(offered))
        return Dialogue(messages, [use.tool for use in offered])

    def _talk(self) -> list[Message]:
        """Draws exchanges that need none of the functions."""
        while True:
            turns = self._exchanges()
            if not any(_MAYBE_CALLED.search(turn[0]["content"]) for turn in turns):
                return [said for turn in turns for said in turn]


def _swap_word(text: str, groups: list[str], rng: random.Random) -> str:
    """Puts another word of the same meaning for one word, if a group knows one."""
    words = text.split(" ")
    choices = [
        (at, other)
        for at, word in enumerate(words)
        for group in groups
        for other in group.split(" | ")
        if word.lower().rstrip("?.!,") in group.split(" | ")
    ]
    if choices:
        at, other = rng.choice(choices)
        words[at] = other + words[at][len(words[at].rstrip("?.!,")) :]
    return " ".join(words)


def _add_or_drop_word(text: str, fillers: list[str], rng: random.Random) -> str:
    """Adds a word that says nothing, or leaves out a short one."""
    words = text.split(" ")
    at = rng.randrange(len(words))
    if len(words) > 3 and len(words[at]) < 4 and words[at].isalpha():
        del words[at]
    else:
        words.insert(at, rng.choice(fillers))
    return " ".join(words)


def _misspell(text: str, rng: random.Random) -> str:
    """Drops, doubles or swaps one letter."""
    at = rng.randrange(max(1, len(text) - 1))
    return rng.choice(
        (
            text[:at] + text[at + 1 :],
            text[: at + 1] + text[at:],
            text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
        )
    )


def _cut(text: str, rng: random.Random) -> tuple[str, str]:
    """Cuts a text behind one of its first words mostly, now and then anywhere."""
    ends = [match.end() for match in re.finditer(r"\S+", text)][:-1] or [len(text)]
    at = rng.choice(ends[:4] if rng.random() < 0.6 else ends)
    roll = rng.random()
    if roll < 0.1:
        at = rng.randrange(1, len(text))
    elif roll < 0.2:
        at += 1  # the prompt ends with a blank
    return text[:at], text[at:]
