"""Conversion of media items, tensors and tickets to messages and back.

What a message has that can't be read raises `InvalidRequestError`, with its field.
"""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from millstream.v1 import encode_pb2, media_pb2, tensor_pb2
from millstream_server.media.items import (
    Content,
    EmbeddingTicket,
    EncodedItem,
    Geometry,
    MediaInput,
    Modality,
    Span,
)
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.runtime.errors import InvalidRequestError

MODALITIES_TO_PROTO = {
    modality: media_pb2.Modality.Value(f"MODALITY_{modality.name}") for modality in Modality
}
MODALITIES = {value: modality for modality, value in MODALITIES_TO_PROTO.items()}
CONTENTS_TO_PROTO = {
    content: media_pb2.EmbeddingContent.Value(f"EMBEDDING_CONTENT_{content.name}")
    for content in Content
}
CONTENTS = {value: content for content, value in CONTENTS_TO_PROTO.items()}
_ELEMENTS_TO_PROTO = {
    kind: tensor_pb2.ElementType.Value(f"ELEMENT_TYPE_{kind.name}") for kind in ElementType
}
_ELEMENTS = {value: kind for kind, value in _ELEMENTS_TO_PROTO.items()}
_GRID = 3


def modalities_to_proto(modalities: frozenset[Modality]) -> list[media_pb2.Modality.ValueType]:
    """Convert kinds of media, in the contract's order."""
    return [value for modality, value in MODALITIES_TO_PROTO.items() if modality in modalities]


def modalities_from_proto(values: Iterable[media_pb2.Modality.ValueType]) -> frozenset[Modality]:
    """Convert kinds of media; unknown, newer ones are left out."""
    return frozenset(MODALITIES[value] for value in values if value in MODALITIES)


# ---- tensors -------------------------------------------------------------------------------------


def spec_to_proto(spec: TensorSpec) -> tensor_pb2.TensorSpec:
    """Convert a tensor's description."""
    return tensor_pb2.TensorSpec(
        element_type=_ELEMENTS_TO_PROTO[spec.element_type], shape=spec.shape
    )


def spec_from_proto(message: tensor_pb2.TensorSpec, field: str) -> TensorSpec:
    """Convert and check a tensor's description; ``field`` is its path."""
    if message.element_type not in _ELEMENTS:
        raise InvalidRequestError.of(f"{field}.element_type", "is not one that this server knows")
    spec = TensorSpec(_ELEMENTS[message.element_type], tuple(message.shape))
    if problem := spec.problem():
        raise InvalidRequestError.of(f"{field}.shape", problem)
    return spec


# ---- geometry ------------------------------------------------------------------------------------


def geometry_to_proto(geometry: Geometry) -> media_pb2.MediaGeometry:
    """Convert a geometry."""
    return media_pb2.MediaGeometry(
        grid=geometry.grid or (),
        seconds_per_step=geometry.seconds_per_step,
        timestamps_s=geometry.timestamps_s,
    )


def geometry_from_proto(message: media_pb2.MediaGeometry, field: str) -> Geometry:
    """Convert a geometry; ``field`` is its path."""
    grid = tuple(message.grid)
    if grid and (len(grid) != _GRID or min(grid) < 1):
        raise InvalidRequestError.of(
            f"{field}.grid", f"must be three numbers above 0, or empty; it is {list(grid)[:8]}"
        )
    return Geometry(
        grid=(grid[0], grid[1], grid[2]) if grid else None,
        seconds_per_step=message.seconds_per_step,
        timestamps_s=tuple(message.timestamps_s),
    )


# ---- tickets and items ---------------------------------------------------------------------------


def ticket_to_proto(ticket: EmbeddingTicket) -> media_pb2.EmbeddingTicket:
    """Convert a ticket."""
    expires_at = Timestamp()
    expires_at.FromMilliseconds(ticket.expires_at_ms)
    return media_pb2.EmbeddingTicket(
        address=ticket.address,
        lease=ticket.lease,
        tensor=spec_to_proto(ticket.tensor),
        content=CONTENTS_TO_PROTO[ticket.content],
        expires_at=expires_at,
        signature=ticket.signature,
    )


def ticket_from_proto(message: media_pb2.EmbeddingTicket, field: str) -> EmbeddingTicket:
    """Convert a ticket; its signature isn't checked here."""
    if message.content not in CONTENTS:
        raise InvalidRequestError.of(f"{field}.content", "is not one that this server knows")
    expires_at = message.expires_at
    return EmbeddingTicket(
        address=message.address,
        lease=message.lease,
        tensor=spec_from_proto(message.tensor, f"{field}.tensor"),
        content=CONTENTS[message.content],
        expires_at_ms=expires_at.seconds * 1000 + expires_at.nanos // 1_000_000,
        signature=message.signature,
    )


def item_to_proto(item: MediaInput) -> media_pb2.MediaItem:
    """Convert an item of a prompt."""
    return media_pb2.MediaItem(
        modality=MODALITIES_TO_PROTO[item.modality],
        spans=[media_pb2.TokenSpan(start=s.start, length=s.length) for s in item.spans],
        geometry=geometry_to_proto(item.geometry),
        digest=item.digest,
        ticket=ticket_to_proto(item.ticket) if item.ticket else None,
    )


def item_from_proto(message: media_pb2.MediaItem, field: str) -> MediaInput:
    """Convert an item of a prompt; ``field`` is its path."""
    if message.modality not in MODALITIES:
        raise InvalidRequestError.of(f"{field}.modality", "is not one that this server knows")
    ticket = (
        ticket_from_proto(message.ticket, f"{field}.ticket") if message.HasField("ticket") else None
    )
    return MediaInput(
        modality=MODALITIES[message.modality],
        spans=tuple(Span(span.start, span.length) for span in message.spans),
        geometry=geometry_from_proto(message.geometry, f"{field}.geometry"),
        digest=message.digest,
        ticket=ticket,
        content=ticket.content if ticket else Content.ROWS,
    )


def ref_to_proto(item: EncodedItem, lease_left_s: float) -> encode_pb2.EmbeddingRef:
    """Convert an encoded item."""
    message = encode_pb2.EmbeddingRef(
        digest=item.digest,
        tokens=item.tokens,
        geometry=geometry_to_proto(item.geometry),
        tensor=spec_to_proto(item.tensor),
        content=CONTENTS_TO_PROTO[item.content],
        lease=item.lease,
        cached=item.cached,
    )
    message.lease_left.FromNanoseconds(int(lease_left_s * 1e9))
    return message


def ref_from_proto(message: encode_pb2.EmbeddingRef, modality: Modality) -> EncodedItem:
    """Convert an encoded item."""
    if message.content not in CONTENTS:
        raise InvalidRequestError.of("ref.content", "is not one that this server knows")
    return EncodedItem(
        modality=modality,
        digest=message.digest,
        tokens=message.tokens,
        geometry=geometry_from_proto(message.geometry, "ref.geometry"),
        tensor=spec_from_proto(message.tensor, "ref.tensor"),
        content=CONTENTS[message.content],
        lease=message.lease,
        cached=message.cached,
    )
