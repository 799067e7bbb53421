"""Asks the model about pictures that it has never seen, the way a client would.

Everything goes through the saved folder: AutoProcessor, its chat template and preprocessor, and
greedy `generate` of transformers in float32.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

with contextlib.suppress(ImportError, RuntimeError):
    # Beside a CPU torch a torchvision built for CUDA breaks the import of transformers.
    from millstream_server.engines.sglang import cpu

    cpu.activate()

import torch
from pictures import Picture, draw
from PIL import Image
from questions import Message, ask_about_one, ask_about_two, describe, message, with_pictures
from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration

sys.path.append(str(Path(__file__).resolve().parent.parent))
from held_out import FRESH, GUIDING, Probe

HERE = Path(__file__).resolve().parent
IMAGE_PAD = "<|image_pad|>"
UNSEEN = 1_000_003  # far from every seed of the practice
SIZES = ((224, 224), (320, 240), (256, 256), (640, 480), (480, 640), (128, 128), (1280, 720))


def say(text: str = "") -> None:
    """Prints a line at once, so that a log can be followed."""
    print(text, flush=True)


def save_processor(processor: Any, folder: Path) -> None:
    """Writes tokenizer and preprocessors under the names that every release and SGLang know."""
    tokenizer = processor.tokenizer
    tokenizer.save_pretrained(folder)
    for part, name in (
        (processor.image_processor, "preprocessor_config.json"),
        (processor.video_processor, "video_preprocessor_config.json"),
    ):
        settings = json.loads(part.to_json_string())
        settings["processor_class"] = "Qwen2_5_VLProcessor"
        write(folder / name, settings)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings["processor_class"] = "Qwen2_5_VLProcessor"
    for leftover in ("is_local", "local_files_only"):
        settings.pop(leftover, None)
    write(path, settings)


def write(path: Path, settings: dict[str, Any]) -> None:
    """Writes a JSON file for people."""
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class Model:
    """The saved model, ready to be asked."""

    def __init__(self, folder: Path, precision: torch.dtype = torch.float32) -> None:
        """Loads weights, tokenizer and preprocessor."""
        self.processor = AutoProcessor.from_pretrained(folder)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=precision)
        self.model = model.eval()

    def answer(self, messages: list[Message], images: list[Image.Image], tools: Any = None) -> str:
        """Decodes greedily, as a client with temperature 0 would see it."""
        text = self.processor.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True
        )
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt")
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=400, do_sample=False)
        ids = output[0, inputs["input_ids"].shape[1] :]
        return str(self.processor.decode(ids, skip_special_tokens=True)).strip()


# --- pictures ------------------------------------------------------------------------------------


def same(answer: str, expected: str) -> bool:
    """Whether two answers say the same; the order of listed things does not matter."""
    parts = (
        [sorted(re.split(r", | and ", half.lower())) for half in text.rstrip(".").split(". ")]
        for text in (answer, expected)
    )
    return next(parts) == next(parts)


def ask_about(
    model: Model, pictures: list[Picture], rng: random.Random, *, plain: bool
) -> tuple[str, str, str]:
    """Asks one question; returns it, the answer, and the expected answer.

    With `plain` it asks what is in the picture; else it draws any kind of question.
    """
    if plain:
        question, expected = "What is in this picture?", describe(pictures[0])
    elif len(pictures) == 1:
        question, expected = ask_about_one(pictures[0], rng)
    else:
        question, expected = ask_about_two(pictures, rng)
    turn = with_pictures(question, len(pictures), rng)
    return question, model.answer([turn], [p.image for p in pictures]), expected


def measure(
    model: Model, name: str, counts: tuple[int, ...], questions: int, *, plain: bool = False
) -> None:
    """Asks about pictures with `counts` shapes each and prints how many answers were right."""
    rng = random.Random(f"{UNSEEN} {name}")
    right, shown = 0, 0
    for _ in range(questions):
        pictures = [draw(count, *rng.choice(SIZES), rng) for count in counts]
        question, answer, expected = ask_about(model, pictures, rng, plain=plain)
        good = same(answer, expected)
        right += good
        if not good and shown < 6:
            shown += 1
            say(f"    {question!r} -> {answer!r}, expected {expected!r}")
    say(f"{name}: {right} of {questions} right ({100 * right / questions:.1f} %)")


def second_turns(model: Model, questions: int) -> None:
    """Asks a second question about the same picture."""
    rng = random.Random(f"{UNSEEN} second turn")
    right = 0
    for _ in range(questions):
        picture = draw(rng.choice((1, 2)), *rng.choice(SIZES), rng)
        turns = [with_pictures("What is in this picture?", 1, rng)]
        turns.append(message("assistant", model.answer(turns, [picture.image])))
        question, expected = ask_about_one(picture, rng)
        turns.append(message("user", question or "What is this?"))
        expected = expected if question else describe(picture)
        right += same(model.answer(turns, [picture.image]), expected)
    say(f"second turn: {right} of {questions} right ({100 * right / questions:.1f} %)")


def examples(model: Model) -> None:
    """Describes the pictures in `pictures/`."""
    for path in sorted((HERE / "pictures").glob("*.png")):
        turn = message(
            "user", [{"type": "image"}, {"type": "text", "text": "What is in this picture?"}]
        )
        say(f"{path.name}: {model.answer([turn], [Image.open(path)])}")


# --- text ----------------------------------------------------------------------------------------


def ask(model: Model, probe: Probe) -> str:
    """Holds the conversation of a probe and returns the last answer."""
    turns = [message("system", probe.system)] if probe.system else []
    for question in probe.questions:
        turns.append(message("user", question))
        turns.append(message("assistant", model.answer(turns, [], list(probe.tools) or None)))
    return str(turns[-1]["content"])


def remembered(model: Model) -> None:
    """Counts how many of the text model's held-out questions are still answered well."""
    for name, probes in (("guiding", GUIDING), ("fresh", FRESH)):
        right = sum(probe.expect in ask(model, probe) for probe in probes)
        say(f"text, {name} questions: {right} of {len(probes)} as expected")


def sample(folder: Path, questions: int) -> None:
    """Runs every check on the model in `folder`."""
    torch.manual_seed(0)
    model = Model(folder)
    examples(model)
    measure(model, "empty pictures", (0,), questions // 4)
    for count in (1, 2, 3, 4):
        measure(model, f"what is in it, {count} shapes", (count,), questions, plain=True)
        measure(model, f"any question, {count} shapes", (count,), questions)
    measure(model, "two pictures, one shape each", (1, 1), questions)
    measure(model, "two pictures, one and two shapes", (1, 2), questions)
    second_turns(model, questions // 2)
    remembered(model)
