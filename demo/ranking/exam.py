"""Asks a ranker about questions it never practised, and counts."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from material import HERE, Material, Passage, read_topics

# A torchvision built for CUDA breaks transformers' import beside a CPU torch. Text needs none.
sys.modules["torchvision"] = None  # type: ignore[assignment]

CHOICES = 20
Score = Callable[[str, list[str]], list[float]]
"""Takes a query and passages, returns a number for each passage: the higher, the closer."""


@dataclass(frozen=True)
class Task:
    """One question of the exam: the first of the passages is the right one."""

    question: str
    passages: list[str]


def tasks(material: Material) -> dict[str, list[Task]]:
    """The exam by kind, each task with one right passage among 20."""
    everyday = [x for x in material.passages if not x.topic.startswith("millstream ")]
    millstream = [x for x in material.passages if x.topic.startswith("millstream ")]
    unseen = read_topics(HERE / "unseen.txt").passages
    return {
        "everyday topics, held-out questions": list(_tasks(everyday, everyday)),
        "Millstream, held-out questions": list(_tasks(millstream, millstream)),
        "passages and questions on unseen topics": list(_tasks(unseen, unseen)),
        "unseen topics among everyday passages": list(_tasks(unseen, everyday)),
        "everyday topics, six passages in one": list(_long_tasks(everyday)),
    }


def _long_tasks(everyday: list[Passage]) -> Iterator[Task]:
    """The everyday questions, with passages of about a hundred tokens each."""
    rng = random.Random(3)
    for passage in everyday:
        others = [x.text for x in everyday if x.topic != passage.topic]
        for question in passage.tests:
            right = " ".join([passage.text, *rng.sample(others, 5)])
            wrong = [" ".join(rng.sample(others, 6)) for _ in range(CHOICES - 1)]
            yield Task(question, [right, *wrong])


def _tasks(asked: list[Passage], others: list[Passage]) -> Iterator[Task]:
    rng = random.Random(1)
    for passage in asked:
        for question in passage.tests:
            # A second passage that the same question asks for would be right as well.
            wrong = [x.text for x in others if question not in x.tests and x.text != passage.text]
            yield Task(question, [passage.text, *rng.sample(wrong, CHOICES - 1)])


def report(material: Material, score: Score) -> dict[str, tuple[int, float, int]]:
    """Prints and returns, by kind: how often the right passage came first, MRR, questions."""
    results = {}
    for kind, asked in tasks(material).items():
        places = []
        for task in asked:
            scores = score(task.question, task.passages)
            places.append(1 + sum(other >= scores[0] for other in scores[1:]))
        first = places.count(1)
        mrr = sum(1 / place for place in places) / len(places)
        results[kind] = first, mrr, len(places)
        print(f"{kind}: first {first} of {len(places)}, MRR {mrr:.3f}", flush=True)
    return results
