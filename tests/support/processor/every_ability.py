"""A Processor over a worker of each ability, on simulated engines: text, vectors, images."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import MODEL, InProcessProcessor, processor, worker
from tests.support.worker import diffusion_worker, embedding_worker

EMBEDDER, PICTURES = embedding_worker.MODEL, diffusion_worker.MODEL


@dataclass
class EveryAbility:
    """The Processor and its workers."""

    front: InProcessProcessor
    text: TextModel
    embedder: embedding_worker.Worker
    pictures: diffusion_worker.Worker

    @property
    def port(self) -> int:
        return self.front.port


@contextlib.asynccontextmanager
async def every_ability(
    folder: Path, pictures: diffusion_worker.Setup | None = None
) -> AsyncIterator[EveryAbility]:
    """Serve models named `MODEL`, `EMBEDDER` and `PICTURES`; ``folder`` gets the text model."""
    text = TextModel.load(alphabet_model(folder))
    async with (
        worker() as chats,
        embedding_worker.embedding_worker() as embedder,
        diffusion_worker.diffusion_worker(pictures) as drawing,
        processor(
            {MODEL: text, EMBEDDER: text, PICTURES: None},
            [chats.address, embedder.settings.listen, drawing.settings.listen],
        ) as front,
    ):
        yield EveryAbility(front, text, embedder, drawing)
