"""What workers in the test's own process are asked for, as it came off the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from millstream_server.control.engine import Role
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.worker.core import GenerationWorker

Starts = list[tuple[Role, GenerationRequest]]


@contextlib.contextmanager
def kept_starts() -> Iterator[Starts]:
    """Keep every request that reaches a worker, with the worker's role."""
    kept: Starts = []
    submit = GenerationWorker.submit

    def keep(self: GenerationWorker, start: GenerationRequest, sink: OutputSink) -> str:
        kept.append((self.role, start))
        return submit(self, start, sink)

    with mock.patch.object(GenerationWorker, "submit", keep):
        yield kept
