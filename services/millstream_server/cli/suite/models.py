"""The models that `millstream up` serves: the one for chats, and further ones."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream_server.embedding.model_files import lacks_answers
from millstream_server.engines.registry import adapter, embedder_for
from millstream_server.media import families
from millstream_server.model_files.state import fetch_advice

_DEMO_MODEL = Path("demo") / "model"
_DEMO_VISION_MODEL = Path("demo") / "vision" / "model"
_DEMO_PICTURE = Path("demo") / "vision" / "pictures" / "red-circle.png"


class PlanError(Exception):
    """The suite can't be started with these options; the text has advice."""


class Task(enum.Enum):
    """What a further model is for; the values name its services."""

    IMAGE = "image"
    TEXT_DIFFUSION = "dllm"
    EMBEDDING = "embedding"
    RERANK = "reranker"

    @property
    def role(self) -> str:
        return "diffusion" if self in (Task.IMAGE, Task.TEXT_DIFFUSION) else "embedding"


DEMOS: Mapping[Task, Path] = {
    Task.IMAGE: Path("demo", "drawing", "model"),
    Task.TEXT_DIFFUSION: Path("demo", "dllm", "model"),
    Task.EMBEDDING: Path("demo", "embedder", "model"),
    Task.RERANK: Path("demo", "reranker", "model"),
}
_ASKED_FOR = {
    Task.IMAGE: "generate_image",
    Task.TEXT_DIFFUSION: "generate_text",
    Task.EMBEDDING: "embed",
    Task.RERANK: "rerank",
}
"""What requests ask each for, as the Processor's --default-models has it."""
_FILES = {Task.IMAGE: "model_index.json"}
"""The file that a model's directory must have, if that isn't config.json."""


@dataclass(frozen=True, slots=True)
class FurtherModel:
    """A further model; it has one worker."""

    task: Task
    path: Path
    name: str
    image_engine: str = "diffusers"
    """The engine of one that makes images, unless the suite is simulated."""

    @property
    def processor_entry(self) -> str:
        """Its entry in the Processor's --models: one that makes images needs no tokenizer there."""
        return self.name if self.task is Task.IMAGE else f"{self.name}={self.path}"

    @property
    def default_entry(self) -> str:
        """Its entry in the Processor's --default-models: an engine may say that it does more."""
        return f"{_ASKED_FOR[self.task]}={self.name}"

    def engine(self, chats: str) -> str:
        """Return the name of its engine, in a suite whose chats are answered by ``chats``."""
        if chats == "simulated":
            return chats
        if self.task in (Task.EMBEDDING, Task.RERANK):
            return embedder_for(self.path, chats)
        return self.image_engine if self.task is Task.IMAGE else chats

    def flags(self, chats: str) -> list[str]:
        """Return its worker's own flags, in such a suite.

        Raises:
            SettingsError: the engine can't serve the model.
        """
        engine = self.engine(chats)
        flags = ["--model-path", str(self.path), "--model-name", self.name]
        match self.task:
            case Task.IMAGE:
                return ["--kind", "image", "--engine", engine, *flags]
            case Task.TEXT_DIFFUSION:
                return [
                    *("--kind", "text"),
                    *("--engine", engine),
                    *flags,
                    *adapter(engine).suite_flags("dllm", self.path),
                ]
            case Task.RERANK if lacks_answers(self.path):
                return ["--engine", engine, *flags, "--rank-answers", "yes,no"]
            case _:
                return ["--engine", engine, *flags]


def default_model(*, multimodal: bool = False) -> Path | None:
    """Return the demo model, in this directory or in the repository; None if there is none."""
    demo = _DEMO_VISION_MODEL if multimodal else _DEMO_MODEL
    found = _find(demo / "config.json")
    return found.parent if found else None


def demo_picture() -> Path | None:
    """Return a picture that the demo model knows; None if there is none."""
    return _find(_DEMO_PICTURE)


def _find(file: Path) -> Path | None:
    roots = (Path.cwd(), Path(__file__).resolve().parents[4])
    return next((root / file for root in roots if (root / file).is_file()), None)


def choose_model(given: Path | None, name: str, *, multimodal: bool = False) -> tuple[Path, str]:
    """Return the model's directory and its name in requests.

    Raises:
        PlanError: there is no such model; the text has advice.
    """
    model = given or default_model(multimodal=multimodal)
    if model is None:
        raise PlanError(
            f"there is no {_DEMO_VISION_MODEL if multimodal else _DEMO_MODEL} here; give --model "
            "DIR, a directory with config.json, *.safetensors, tokenizer.json and a chat template"
        )
    if not (model / "config.json").is_file():
        raise PlanError(
            fetch_advice(model) or f"{model} is no model directory: no config.json in it"
        )
    if "," in str(model.resolve()) or any(sign in name for sign in ",="):
        raise PlanError(
            "neither the model's directory nor its name may have a comma (nor = its name)"
        )
    model = model.resolve()
    return model, name or _name(model)


def choose_further(task: Task, given: Path | None) -> FurtherModel:
    """Return a further model; ``given`` None: the demo model.

    Raises:
        PlanError: there is no such model; the text has advice.
    """
    needed = _FILES.get(task, "config.json")
    found = given / needed if given is not None else _find(DEMOS[task] / needed)
    if found is None or not found.is_file():
        where = given if given is not None else DEMOS[task]
        raise PlanError(fetch_advice(where) or f"{where} is no model directory: it has no {needed}")
    model = found.parent.resolve()
    if "," in str(model):
        raise PlanError(f"the directory {model} may not have a comma in its name")
    is_demo = model.parts[-3:] == DEMOS[task].parts
    return FurtherModel(task, model, f"demo-{model.parts[-2]}" if is_demo else model.name)


def _name(model: Path) -> str:
    """Return a model's name; the demo models' directories are called "model", which is no use."""
    if model.parts[-3:] == _DEMO_VISION_MODEL.parts:
        return "demo-vision"
    return model.parent.name if model.parts[-2:] == _DEMO_MODEL.parts else model.name


def check_vision(model: Path) -> None:
    """Check that a model takes images.

    Raises:
        PlanError: it takes none.
    """
    try:
        family = families.load(model)
    except families.UnusableFamilyError as error:
        raise PlanError(str(error)) from error
    if family is None:
        raise PlanError(
            f"{model} takes no images: its config.json is of a text model; leave out --multimodal, "
            "or give --model DIR with a vision-language model"
        )
