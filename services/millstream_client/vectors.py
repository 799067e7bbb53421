"""Vectors and scores."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.v1 import embedding_pb2, processor_pb2
from millstream_client.errors import from_request_error

MAX_INPUTS = 2048
_MAX_BYTES = 3 << 20
"""A request's inputs: it has to fit in a message of 4 MiB."""

EmbedText = str | Sequence[int]
"""A text, or its token ids."""


@dataclass(slots=True)
class Embeddings:
    """The vectors of some texts, in their order."""

    vectors: list[array[float]] = field(default_factory=list)
    """float32; ``numpy.array(embeddings.vectors)`` makes a matrix of them."""
    model: str = ""
    request_id: str = ""
    input_tokens: int = 0

    def __iter__(self) -> Iterator[array[float]]:
        """Iterate the vectors."""
        return iter(self.vectors)

    def __len__(self) -> int:
        """Return how many vectors there are."""
        return len(self.vectors)

    def __getitem__(self, index: int) -> array[float]:
        """Return a vector."""
        return self.vectors[index]


@dataclass(slots=True)
class CollectedVectors:
    """The vectors of one request so far."""

    count: int
    request_id: str = ""
    model: str = ""
    input_tokens: int = 0
    complete: bool = False
    found: dict[int, array[float]] = field(default_factory=dict)

    @property
    def begun(self) -> bool:
        """False: vectors can be asked for again."""
        return False

    def add(self, message: embedding_pb2.EmbedResponse) -> None:
        """Add one message of the stream, which has one request.

        Raises:
            MillstreamError: the request failed.
        """
        for part in message.vectors:
            numbers = array("f", part.values)
            if sys.byteorder == "big":
                numbers.byteswap()
            width = part.dimensions
            for i, index in enumerate(part.indices):
                self.found[index] = numbers[i * width : (i + 1) * width]
        for error in message.errors:
            raise from_request_error(error.error)
        for finished in message.finished:
            self.request_id, self.model = finished.request_id, finished.model
            self.input_tokens = finished.usage.input_tokens
            self.complete = len(self.found) == self.count


def embed_requests(
    texts: Sequence[EmbedText], **fields: Any
) -> Iterator[embedding_pb2.EmbedRequest]:
    """Make the requests for texts: one, or more where they don't fit in one."""
    request, size = _empty(fields), 0
    for text in texts:
        part = _input(text)
        nbytes = part.ByteSize()
        if request.start.inputs and (
            len(request.start.inputs) >= MAX_INPUTS or size + nbytes > _MAX_BYTES
        ):
            yield request
            request, size = _empty(fields), 0
        request.start.inputs.append(part)
        size += nbytes
    yield request


def _empty(fields: dict[str, Any]) -> embedding_pb2.EmbedRequest:
    given = {name: value for name, value in fields.items() if value is not None}
    return embedding_pb2.EmbedRequest(start=embedding_pb2.StartEmbed(**given))


def _input(text: EmbedText) -> embedding_pb2.EmbedInput:
    if isinstance(text, str):
        return embedding_pb2.EmbedInput(text=text)
    return embedding_pb2.EmbedInput(token_ids=processor_pb2.TokenIds(ids=text))
