"""What workers in the test's own process are asked for, as it came off the wire."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from millstream_server.engines.base import OutputSink, Role
from millstream_server.worker.core import WorkerCore
from millstream_server.worker_stream.start import GenerationStart

Starts = list[tuple[Role, GenerationStart]]


@contextlib.contextmanager
def kept_starts() -> Iterator[Starts]:
    """Keep every request that reaches a worker, with the worker's role."""
    kept: Starts = []
    submit = WorkerCore.submit

    def keep(self: WorkerCore, start: GenerationStart, sink: OutputSink) -> str:
        kept.append((self.role, start))
        return submit(self, start, sink)

    with mock.patch.object(WorkerCore, "submit", keep):
        yield kept
