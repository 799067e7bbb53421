"""Equal texts with different pictures never mix: not in flight, nor in a cache."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.e2e.multimodal.conftest import Suite
from tests.support.media.vision_chats import Question, ask, check, photo

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

# No near ties: `vision_chats.check` would name one.
_SEEDS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16, 17, 20, 21)


def which(seed: int) -> Question:
    """Ask the same about a picture of one of three sizes."""
    return Question.of("Which mill is this? ", photo(64 + 32 * (seed % 3), 64, seed=seed))


async def test_the_same_text_with_different_pictures_in_flight(suite: Suite, either: Any) -> None:
    questions = [which(seed) for seed in _SEEDS]
    cases = [question.case(suite.model) for question in questions]
    assert len({tuple(case.token_ids) for case in cases}) == len(_SEEDS)
    at_once = await asyncio.gather(
        *(ask(either, question) for question in [*questions, *reversed(questions)])
    )
    for answer, case in zip(at_once, [*cases, *reversed(cases)], strict=True):
        check(answer, case)


async def lookups(suite: Suite) -> Counter[str]:
    """Count the encode worker's lookups by result so far, and what its tower ran."""
    counts: Counter[str] = Counter()
    for family in (await suite.scrape()).families.values():
        for sample in family.samples:
            if sample.name == "millstream_encode_lookups_total":
                counts[sample.labels["result"]] += int(sample.value)
            elif sample.name == "millstream_encode_batched_items_total":
                counts["encoded"] += int(sample.value)
    return counts


async def test_a_picture_in_two_chats_at_once_is_encoded_once(suite: Suite, stub: Any) -> None:
    shared = photo(192, 160, seed=900)
    questions = [Question.of("Twice: ", shared, shared), Question.of(shared, "Once")]
    before = await lookups(suite)
    answers = await asyncio.gather(*(ask(stub, question) for question in questions))
    after = await lookups(suite)
    for answer, question in zip(answers, questions, strict=True):
        check(answer, question.case(suite.model))
    grown = after - before
    assert grown["miss"] == grown["encoded"] == 1
    assert grown["hit"] + grown["joined"] >= 1


async def test_the_prefix_cache_knows_pictures_apart(suite: Suite, either: Any) -> None:
    def about(seed: int) -> Question:
        return Question.of("A text that begins alike. " * 3, photo(96, 96, seed=seed), " So?")

    this, other = about(31), about(32)
    case, other_case = this.case(suite.model), other.case(suite.model)
    (span,) = case.prompt.media[0].spans
    check(await ask(either, this), case)
    again = await ask(either, this)
    check(again, case)
    assert again.usage.cached_tokens >= span.start + span.length
    changed = await ask(either, other)
    check(changed, other_case)
    assert 0 < changed.usage.cached_tokens <= span.start
