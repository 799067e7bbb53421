"""What the endpoints use of the Processor.

Its methods raise a `ServingError` for what is refused or fails, with the fields of the plain types
or of the contract, which `http.errors` renames.
"""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.embedding.core import VectorsCore
from millstream_server.processor.front import Front
from millstream_server.processor.texts import Texts
from millstream_server.runtime.work.pool import WorkPool


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All of it; one per process."""

    calls: Front
    threads: WorkPool
    """Large bodies are read in these."""
    chats: ProcessorCore
    texts: Texts
    vectors: VectorsCore
    images: DiffusionCore
