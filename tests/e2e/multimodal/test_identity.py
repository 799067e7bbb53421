"""Greedy tokens are transformers' own, whatever way the prompt took."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from millstream.v1 import sampling_pb2
from tests.e2e.multimodal.conftest import Suite
from tests.support.media import media_files
from tests.support.media.reference_media import Case
from tests.support.media.vision_chats import (
    Question,
    ask,
    check,
    check_videos,
    film,
    photo,
    picture_questions,
    video_questions,
)

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LONG, SHORT = film(media_files.video(12)), film(media_files.video(7, size=(96, 64), rate=8))
QUESTIONS = [
    *picture_questions([1, 21, 41, 61, 81, 101, 121, 141, 161, 184, 201, 221]),
    Question.of("What moves? ", LONG, " Say it."),
    Question.of(photo(seed=1), " before ", SHORT, photo(96, 64, seed=21), " and after"),
]


@pytest.fixture(scope="module")
def cases(suite: Suite) -> list[Case]:
    """What transformers answers, one prompt after the other."""
    cases = [question.case(suite.model) for question in QUESTIONS]
    # A model that answers everything alike would make the comparison worthless.
    assert len({tuple(case.token_ids) for case in cases}) == len(QUESTIONS)
    return cases


async def test_all_at_once(cases: list[Case], either: Any) -> None:
    answers = await asyncio.gather(*(ask(either, question) for question in QUESTIONS))
    for answer, case in zip(answers, cases, strict=True):
        check(answer, case)


async def test_one_by_one_with_the_ids_of_the_prompt(cases: list[Case], either: Any) -> None:
    """The prompt's logprobs name its ids, which are those of transformers' processor."""
    wanted = sampling_pb2.LogprobOptions(prompt=True)
    for question, case in zip(QUESTIONS, cases, strict=True):
        answer = await ask(either, question, logprobs=wanted)
        check(answer, case)
        assert answer.finished is not None
        entries = answer.prompt_logprobs
        assert [entry.token_id for entry in entries] == list(case.prompt.token_ids)
        without = sum(math.isnan(entry.logprob) for entry in entries)
        assert without == 1 + case.prompt.media_tokens, "the first, and the placeholders"


async def test_videos_by_their_logprobs(suite: Suite, either: Any) -> None:
    await check_videos(either, suite.model, video_questions("qwen3_vl", [10, 10, 0]))
