"""Traffic with shared prefixes, for studies of routing in virtual time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from millstream_server.kv_cache.hashing import block_hashes

BLOCK_SIZE = 16
_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    prompt: Sequence[int]
    answer: Sequence[int]
    hashes: Sequence[int]
    """Of the blocks of prompt and answer."""

    @property
    def prompt_hashes(self) -> Sequence[int]:
        """Those of the prompt alone."""
        return self.hashes[: len(self.prompt) // BLOCK_SIZE]


class Traffic:
    """Chats of several tenants, questions on documents, and prompts that share nothing.

    Tenants and documents are as popular as Zipf's law says. All times are drawn beforehand, so each
    policy gets the same requests. ``workers`` scales everything, and a worker's share stays equal.
    """

    def __init__(self, workers: int, seed: int = 1) -> None:
        """Prepare the texts."""
        self._rng = random.Random(seed)
        self._workers = workers
        self._systems = [self._text(256, 2048) for _ in range(4 + workers // 2)]
        self._documents = [self._text(1500, 6000) for _ in range(12 * workers)]

    def arrivals(self, seconds: float, per_worker_s: float) -> list[Arrival]:
        """Return the requests of a time, ``per_worker_s`` a second for each worker, in order."""
        rng = self._rng
        found: list[Arrival] = []
        while len(found) < seconds * per_worker_s * self._workers:
            at_s, kind = rng.uniform(0, seconds), rng.random()
            if kind < 0.45:
                found += [turn for turn in self._chat(at_s) if turn.at_s < seconds]
            elif kind < 0.9:
                document = self._popular(self._documents)
                found.append(self._arrival(at_s, document + self._text(30, 120), 20, 120))
            else:
                found.append(self._arrival(at_s, self._text(200, 1500), 20, 200))
        return sorted(found, key=lambda arrival: arrival.at_s)

    def _chat(self, at_s: float) -> list[Arrival]:
        rng = self._rng
        context = self._popular(self._systems)
        turns = []
        for _ in range(rng.randrange(1, 6)):
            context = context + self._text(30, 300)
            turns.append(self._arrival(at_s, context, 50, 250))
            context = context + list(turns[-1].answer)
            at_s += rng.uniform(8, 25)
        return turns

    def _arrival(self, at_s: float, prompt: list[int], least: int, most: int) -> Arrival:
        answer = self._text(least, most)
        return Arrival(at_s, prompt, answer, block_hashes(prompt + answer, BLOCK_SIZE))

    def _popular(self, texts: Sequence[list[int]]) -> list[int]:
        """Draw the n-th text with a weight of about 1/n."""
        return texts[int(len(texts) ** self._rng.random()) - 1]

    def _text(self, least: int, most: int) -> list[int]:
        rng = self._rng
        return [int(rng.random() * _VOCABULARY) for _ in range(rng.randrange(least, most))]
