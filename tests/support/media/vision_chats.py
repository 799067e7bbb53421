"""Questions with pictures and videos: as a client asks them, and what transformers answers."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np

from millstream.v1 import chat_pb2, sampling_pb2
from millstream_server.media.decoding.sampling import FrameSampling, sample
from millstream_server.media.items import Frames, Modality
from tests.support.media import media_files, media_suite
from tests.support.media.reference_media import Case, make_case
from tests.support.models.vision_models import (
    FamilyName,
    as_array,
    as_png,
    clip,
    picture,
    rendered,
)
from tests.support.processor.chats import Answer, Conversation, options, start

NEW_TOKENS = 8
_READ_FPS = 2.0
_MOST_FRAMES = 128


@dataclass(frozen=True)
class File:
    """A file, and the frames that a model sees of it."""

    data: bytes
    frames: Frames

    @property
    def part(self) -> chat_pb2.ContentPart:
        """The file in a message."""
        if self.frames.modality is Modality.IMAGE:
            return media_suite.image(self.data)
        return media_suite.video(self.data)


Part = str | File


def photo(width: int = 64, height: int = 64, *, seed: int) -> File:
    """Draw a picture; another seed is another one."""
    frames = picture(width, height, seed=seed)
    return File(as_png(frames), frames)


def film(data: bytes, family: FamilyName = "qwen3_vl") -> File:
    """Read a video as the family's processor does."""
    with av.open(io.BytesIO(data)) as container:
        fps = float(container.streams.video[0].average_rate or 0)
        pictures = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    total = len(pictures)
    rule = FrameSampling.ARANGE if family == "qwen2_5_vl" else FrameSampling.LINSPACE
    indices = sample(rule, total, fps, fps=_READ_FPS, max_frames=_MOST_FRAMES)
    height, width, _ = pictures[0].shape
    pixels = np.stack([pictures[index] for index in indices])
    frames = Frames(
        modality=Modality.VIDEO,
        width=width,
        height=height,
        data=memoryview(pixels.tobytes()),
        count=len(indices),
        fps=fps,
        total_frames=total,
        indices=indices,
    )
    return File(data, frames)


@dataclass(frozen=True)
class Question:
    """A user's message of texts and files in order."""

    parts: tuple[Part, ...]

    @classmethod
    def of(cls, *parts: Part) -> Question:
        """Make a question of its parts."""
        return cls(parts)

    @property
    def message(self) -> chat_pb2.ChatMessage:
        """The message to a Processor."""
        return media_suite.user(*(p if isinstance(p, str) else p.part for p in self.parts))

    @property
    def content(self) -> list[dict[str, str]]:
        """The parts as templates take them."""
        return [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else {"type": part.frames.modality.value}
            for part in self.parts
        ]

    def case(self, model: Path, n: int = NEW_TOKENS) -> Case:
        """Ask transformers."""
        return case_of(model, [{"role": "user", "content": self.content}], self.parts, n)


def case_of(
    model: Path, messages: Sequence[dict[str, Any]], parts: Iterable[Part], n: int = NEW_TOKENS
) -> Case:
    """Ask transformers to go on with a conversation; ``parts`` has its files in order."""
    files = [part.frames for part in parts if isinstance(part, File)]
    return make_case(
        model,
        rendered(model, messages),
        [frames for frames in files if frames.modality is Modality.IMAGE],
        [frames for frames in files if frames.modality is Modality.VIDEO],
        n=n,
    )


async def ask(
    stub: Any,
    question: Question,
    max_new_tokens: int = NEW_TOKENS,
    *,
    model: str = "",
    **knobs: Any,
) -> Answer:
    """Ask a Processor, greedily unless told otherwise."""
    settings = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, **knobs}
    opts = options(max_new_tokens, **settings)
    conversation = Conversation(stub)
    await conversation.say(start(messages=[question.message], opts=opts, model=model))
    (answer,) = await conversation.end()
    return answer


def check(answer: Answer, case: Case) -> None:
    """Check an answer: transformers' tokens, every one, and its count of the prompt's.

    If it was asked for logprobs, these too.
    """
    entries = answer.choices[0].logprobs
    logprobs = [entry.logprob for entry in entries] if entries else case.logprobs
    case.check_exactly(answer.choices[0].token_ids, logprobs)
    assert answer.usage.prompt_tokens == len(case.prompt)
    assert answer.usage.media_tokens == case.prompt.media_tokens
    assert answer.usage.completion_tokens == len(case.token_ids)


_SIZES = ((64, 64), (96, 64), (170, 100), (40, 200), (224, 224), (33, 71), (128, 32))
_LAYOUTS = (
    ("{0}", "What is this?"),
    ("Look at ", "{0}", "{1}", ", please."),
    ("First ", "{0}", " then ", "{1}", " and last ", "{2}"),
    ("{0}", "{1}", "{2}", " or ", "{3}", "?"),
    ("def mill(): ", "{0}"),
    ("{0}", " beside ", "{1}"),
    ("{0}", "{1}", "{2}", "Which one turns?"),
    ("a ", "{0}", " b ", "{1}", " c ", "{2}", " d ", "{3}", " e"),
    ("The same twice: ", "{0}", " = ", "{0}"),
)


def picture_questions(seeds: Sequence[int]) -> list[Question]:
    """Make a question a seed, with 1 to 4 pictures of different sizes among the text.

    A test names seeds whose answers have no near ties.
    """
    return [_laid_out(place, seed) for place, seed in enumerate(seeds)]


def video_questions(family: FamilyName, seeds: Sequence[int]) -> list[Question]:
    """Make three questions, each with a video of coloured tiles drawn by its seed.

    8 frames of 64 x 64 at 4 fps, 48 of 96 x 64 at 8 fps, 30 of 160 x 112 at 10 fps; half, a quarter
    and a fifth of the frames are read.
    """
    kinds = ((8, 64, 64, 4), (48, 96, 64, 8), (30, 160, 112, 10))
    return [
        Question.of("What moves? ", film(_tiles(seed, *kind), family), " Say it.")
        for seed, kind in zip(seeds, kinds, strict=True)
    ]


def _tiles(seed: int, frames: int, width: int, height: int, fps: int) -> bytes:
    return media_files.video(rate=fps, drawn=as_array(clip(frames, width, height, seed=seed)))


async def check_videos(
    stub: Any, model: Path, questions: Sequence[Question], name: str = ""
) -> None:
    """Ask each question; check 16 tokens and their logprobs."""
    wanted = sampling_pb2.LogprobOptions()
    for question in questions:
        answer = await ask(stub, question, 16, model=name, logprobs=wanted)
        assert len(answer.choices[0].logprobs) == 16
        check(answer, question.case(model, 16))


def _laid_out(number: int, seed: int) -> Question:
    parts: list[Part] = []
    for piece in _LAYOUTS[number % len(_LAYOUTS)]:
        if piece.startswith("{"):
            place = int(piece[1])
            width, height = _SIZES[(number * 3 + place * 2) % len(_SIZES)]
            parts.append(photo(width, height, seed=10 * seed + place))
        else:
            parts.append(piece)
    return Question(tuple(parts))
