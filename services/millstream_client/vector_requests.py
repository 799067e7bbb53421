"""Makes the request messages of vectors and rankings from plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

from millstream.v1 import embedding_pb2, processor_pb2
from millstream_client.knobs import check_names
from millstream_client.requests import TextOrIds

if TYPE_CHECKING:
    from typing import Unpack

EmbedInput = TextOrIds | Sequence[TextOrIds]
"""One or more texts, or their token ids."""
_MAX_INPUTS = 2048
_MAX_BYTES = 3 << 20
"""A request's inputs: it has to fit in a message of 4 MiB."""


class EmbedKnobs(TypedDict, total=False):
    """What a request for vectors may be given."""

    dimensions: int | None
    normalize: bool | None
    prompt_name: str | None
    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType | None


class RerankKnobs(TypedDict, total=False):
    """What a request for scores may be given."""

    top_n: int | None
    instruction: str | None
    return_documents: bool
    model: str
    request_id: str
    priority: processor_pb2.RequestPriority.ValueType


def embed_requests(
    texts: EmbedInput, **knobs: Unpack[EmbedKnobs]
) -> Iterator[embedding_pb2.EmbedRequest]:
    """Make the requests for texts: one, or more where they don't fit in one.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
    """
    check_names(knobs, EmbedKnobs, "vectors")
    fields: Any = knobs  # a priority may be None, which leaves it unset
    return _batches(_listed(texts), embedding_pb2.StartEmbed(**fields))


def _batches(
    texts: Iterable[TextOrIds], start: embedding_pb2.StartEmbed
) -> Iterator[embedding_pb2.EmbedRequest]:
    request, size = embedding_pb2.EmbedRequest(start=start), 0
    for text in texts:
        part = _input(text)
        nbytes = part.ByteSize()
        count = len(request.start.inputs)
        if count and (count >= _MAX_INPUTS or size + nbytes > _MAX_BYTES):
            yield request
            request, size = embedding_pb2.EmbedRequest(start=start), 0
        request.start.inputs.append(part)
        size += nbytes
    yield request


def rerank_request(
    query: str, documents: Sequence[str], **knobs: Unpack[RerankKnobs]
) -> embedding_pb2.RerankRequest:
    """Make the request for scores.

    Raises:
        TypeError: an unknown knob, or a value of the wrong type.
    """
    check_names(knobs, RerankKnobs, "scores")
    return embedding_pb2.RerankRequest(query=query, documents=documents, **knobs)


def _listed(texts: Any) -> Sequence[TextOrIds]:
    """Return a list of inputs; a text, or the token ids of one, is one input."""
    one = isinstance(texts, str) or (texts and isinstance(texts[0], int))
    listed: Sequence[TextOrIds] = [texts] if one else texts
    return listed


def _input(text: TextOrIds) -> embedding_pb2.EmbedInput:
    if isinstance(text, str):
        return embedding_pb2.EmbedInput(text=text)
    return embedding_pb2.EmbedInput(token_ids=processor_pb2.TokenIds(ids=text))
