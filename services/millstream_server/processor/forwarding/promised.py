"""Whether a worker has sent what was asked of it: a client must not get a part as the whole."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from millstream_server.links.unread import not_asked_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from millstream_server.synthesis.request import Chunk, Finished, Progress
    from millstream_server.vectors.request import Ranked, Vectors

_FLOAT_BYTES = 4
_PIXEL_BYTES = 4
_EXTRA_BYTES = 16 << 20
"""Of a file besides its pixels; the prompt is in it."""
_PREVIEW_BYTES = 1 << 20
"""Workers' have 512 x 512 pixels at most."""
_TEXT_CHARS = 4096
"""Most characters of a URL and of the names that a worker chooses."""


class PromisedVectors:
    """The vectors of one batch: each input's once, of the right size."""

    def __init__(self, inputs: int, dimensions: int, worker: str) -> None:
        """Expect so many vectors of so many numbers."""
        self._missing = set(range(inputs))
        self._dimensions = dimensions
        self._worker = worker

    def check(self, vectors: Vectors) -> None:
        """Check some of them.

        Raises:
            WorkerLostError: they are others than those that were asked for.
        """
        indices = set(vectors.indices)
        expected = _FLOAT_BYTES * self._dimensions * len(vectors.indices)
        if len(indices) < len(vectors.indices) or not indices <= self._missing:
            raise not_asked_for(self._worker, f"vectors of inputs {sorted(vectors.indices)[-8:]}")
        if vectors.dimensions != self._dimensions or len(vectors.values) != expected:
            got = f"{vectors.dimensions} dimensions and {len(vectors.values)} bytes"
            raise not_asked_for(self._worker, f"{len(indices)} vectors of {got}")
        self._missing -= indices

    def check_all(self) -> None:
        """Check that none is missing at the end.

        Raises:
            WorkerLostError: some are.
        """
        if self._missing:
            raise not_asked_for(self._worker, f"an end, with {len(self._missing)} vectors missing")


class PromisedFiles:
    """The files of one request."""

    def __init__(self, outputs: int, pixels: int, worker: str, *, to_url: bool) -> None:
        """Expect so many files of so many pixels each, as bytes or ``to_url``."""
        self._outputs = outputs
        self._most_bytes = _PIXEL_BYTES * pixels + _EXTRA_BYTES
        self._worker = worker
        self._to_url = to_url
        self._bytes: Counter[int] = Counter()

    def check(self, chunk: Chunk) -> None:
        """Check a piece of one.

        Raises:
            WorkerLostError: it isn't one that was asked for.
        """
        if self._to_url or chunk.output >= self._outputs:
            raise not_asked_for(self._worker, f"a chunk of output {chunk.output}")
        self._bytes[chunk.output] += len(chunk.data)
        if self._bytes[chunk.output] > self._most_bytes:
            what = f"more than {self._most_bytes} bytes of output {chunk.output}"
            raise not_asked_for(self._worker, what)

    def check_progress(self, progress: Progress) -> None:
        """Check the size of a preview.

        Raises:
            WorkerLostError: it is no small image.
        """
        if len(progress.preview) > _PREVIEW_BYTES:
            what = f"a preview of {len(progress.preview)} bytes"
            raise not_asked_for(self._worker, what)

    def check_all(self, end: Finished) -> None:
        """Check that nothing is missing at the end.

        Raises:
            WorkerLostError: something is.
        """
        sizes = [file.total_bytes for file in end.outputs]
        sent = [self._bytes[output] for output in range(self._outputs)]
        if len(sizes) != self._outputs or not (self._to_url or sizes == sent):
            what = f"{sent} bytes of {sizes[:8]}, of {self._outputs} outputs"
            raise not_asked_for(self._worker, what)
        longest = max(len(text) for text in (end.settings.scheduler, *(f.url for f in end.outputs)))
        if longest > _TEXT_CHARS:
            raise not_asked_for(self._worker, f"a URL or a name of {longest} characters")


def check_ranked(results: Sequence[Ranked], documents: int, top_n: int | None, worker: str) -> None:
    """Check that a ranking has the right number of documents, each once.

    Raises:
        WorkerLostError: it hasn't.
    """
    indices = {ranked.index for ranked in results}
    expected = min(documents, documents if top_n is None else top_n)
    valid = indices <= set(range(documents))
    if not valid or len(indices) != len(results) or len(results) != expected:
        raise not_asked_for(worker, f"{len(results)} scores, of {expected}")
