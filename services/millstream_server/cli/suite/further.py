"""The models that `millstream up` serves beside the one for chats."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millstream_server.engines.registry import adapter


class Task(enum.Enum):
    """What a further model is for; the values name its services."""

    IMAGE = "image"
    TEXT_DIFFUSION = "dllm"
    EMBEDDING = "embedding"
    RERANK = "reranker"

    @property
    def role(self) -> str:
        """The role of its workers."""
        return "diffusion" if self in (Task.IMAGE, Task.TEXT_DIFFUSION) else "embedding"


DEMOS: Mapping[Task, Path] = {
    Task.IMAGE: Path("demo", "drawing", "model"),
    Task.TEXT_DIFFUSION: Path("demo", "dllm", "model"),
    Task.EMBEDDING: Path("demo", "embedder", "model"),
    Task.RERANK: Path("demo", "reranker", "model"),
}
_FILES = {Task.IMAGE: "model_index.json"}


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

    def engine(self, chats: str) -> str:
        """Return the name of its engine, in a suite whose chats are answered by ``chats``."""
        return self.image_engine if self.task is Task.IMAGE and chats != "simulated" else chats

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
            case _:
                return ["--engine", engine, *flags]


def marker(task: Task) -> str:
    """Return the file that a model's directory must have."""
    return _FILES.get(task, "config.json")
