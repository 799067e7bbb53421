"""The other families, as cheaply as it goes: Gemma 3 handed off, Qwen2.5-VL aggregated.

Gemma 3 has no M-RoPE, and its tower is that of transformers. By its name this file comes first, so
that its engines have ended when those of the others start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.multimodal.conftest import talking
from tests.support.media import media_files
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
from tests.support.models.vision_models import FamilyName, make_vision_model
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import CANCEL, Conversation, options, start

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

Families = tuple[ServiceProcess, dict[FamilyName, Path]]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    """One Processor with both models, and the models."""
    logs, models = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("models")
    gemma = make_vision_model(models / "gemma", "gemma3")
    qwen = make_vision_model(models / "qwen", "qwen2_5_vl")

    def worker(name: str, module: str, **flags: object) -> ServiceProcess:
        return ServiceProcess(f"millstream_server.{module}", flags, logs / f"{name}.log")

    def engine(name: str, module: str, model: Path, **flags: object) -> ServiceProcess:
        return worker(name, module, model_path=model, max_total_tokens=8192, **flags)

    workers = [
        worker("encode-gemma", "encode", model_path=gemma),
        engine("prefill", "prefill", gemma, bootstrap_port=free_port()),
        engine("decode", "decode", gemma, mode="disaggregated"),
        worker("encode-qwen", "encode", model_path=qwen),
        engine("aggregated", "decode", qwen),
    ]
    front = ServiceProcess(
        "millstream_server.processor",
        {
            "models": f"gemma={gemma},qwen={qwen}",
            "workers": ",".join(one.address for one in workers),
        },
        logs / "front.log",
    )
    with running(*workers, front):
        yield front, {"gemma3": gemma, "qwen2_5_vl": qwen}


# No near ties: `vision_chats.check` would name one.
_GEMMA = picture_questions([1, 22, 42, 61, 81, 101, 121, 141, 161, 181, 201, 222])
_QWEN = [
    *picture_questions([1, 21, 41, 62, 81, 101, 121, 142, 161, 181, 201, 222]),
    Question.of(
        photo(seed=1),
        " before ",
        film(media_files.video(7, size=(96, 64), rate=8), "qwen2_5_vl"),
        photo(96, 64, seed=21),
        " and after",
    ),
]


@pytest.mark.parametrize(
    ("family", "questions"), [("gemma3", _GEMMA), ("qwen2_5_vl", _QWEN)], ids=["gemma3", "qwen"]
)
async def test_greedy_tokens_are_those_of_transformers(
    families: Families, family: FamilyName, questions: list[Question]
) -> None:
    front, models = families
    model = models[family]
    cases = [question.case(model) for question in questions]
    assert len({tuple(case.token_ids) for case in cases}) == len(questions)
    async with talking(front.address) as stub:
        for _ in range(2):  # the second time from the caches
            answers = await asyncio.gather(
                *(ask(stub, question, model=model.name) for question in questions)
            )
            for answer, case in zip(answers, cases, strict=True):
                check(answer, case)


async def test_videos_by_their_logprobs(families: Families) -> None:
    front, models = families
    model = models["qwen2_5_vl"]
    questions = video_questions("qwen2_5_vl", [10, 0, 0])
    async with talking(front.address) as stub:
        await check_videos(stub, model, questions, model.name)


async def test_a_video_needs_no_explicit_budget(families: Families) -> None:
    """The answer may fill the context; its beginning is enough."""
    front, models = families
    question = video_questions("qwen2_5_vl", [10, 0, 0])[0]
    opts = options(temperature=0, ignore_eos=True)
    async with talking(front.address) as stub:
        chat = Conversation(stub)
        model = models["qwen2_5_vl"].name
        await chat.say(start(messages=[question.message], opts=opts, model=model))
        while not (chat.answers and chat.answers[0].choices):
            assert await chat.read()
        await chat.say(CANCEL)
        assert (await chat.answer()).usage.completion_tokens > 0
        await chat.end()
