"""What a worker can do for clients."""

from __future__ import annotations

import enum

from millstream_server.engines.base import Role, WorkerDescription
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.synthesis.diffuser import DiffuserInfo
from millstream_server.synthesis.request import Kind
from millstream_server.vectors.embedder import EmbedderInfo


class Task(enum.Enum):
    """Something that a model can do; a value is the RPC that does it."""

    CHAT = "ProcessorService.Chat"
    COMPLETE = "ProcessorService.Complete"
    EMBED = "EmbeddingService.Embed"
    RERANK = "EmbeddingService.Rerank"
    GENERATE_IMAGE = "DiffusionService.GenerateImage"
    GENERATE_VIDEO = "DiffusionService.GenerateVideo"
    GENERATE_TEXT = "DiffusionService.GenerateText"


TEXT_TASKS = frozenset({Task.CHAT, Task.COMPLETE, Task.GENERATE_TEXT})
"""Those whose result is tokens, one after the other."""
TASK_OF_KIND = {Kind.IMAGE: Task.GENERATE_IMAGE, Kind.VIDEO: Task.GENERATE_VIDEO}


def tasks_of(description: WorkerDescription) -> frozenset[Task]:
    """Return what a worker does by itself or with others; CHAT depends on the model's files."""
    engine = description.engine
    if isinstance(engine, DiffuserInfo):
        return frozenset(TASK_OF_KIND[kind] for kind in engine.kinds)
    if isinstance(engine, EmbedderInfo):
        does = {Task.EMBED: engine.embeds, Task.RERANK: engine.ranks}
        return frozenset(task for task, able in does.items() if able)
    if not isinstance(engine, GeneratorInfo):
        return frozenset()
    text = {Task.COMPLETE}
    return frozenset(text | {Task.GENERATE_TEXT} if description.role is Role.DIFFUSION else text)
