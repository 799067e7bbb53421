"""Batches of vectors on a link: what `SlotStream` needs of their RPC."""

from __future__ import annotations

from typing import Any

import grpc

from millstream.v1 import embedding_pb2, embedding_pb2_grpc
from millstream_server.links.slot_stream import SlotCall
from millstream_server.protobuf.embedding import Content, embed_content, embed_to_proto
from millstream_server.vectors.output import EmbedFinished, Vectors
from millstream_server.vectors.request import EmbedRequest

EmbedCall = SlotCall[Vectors, EmbedFinished]

_ENTRY_BYTES = 512
"""Of an entry without its content."""


class EmbedRpc:
    """The `SlotRpc` of EmbeddingService.Embed."""

    method = "millstream.v1.EmbeddingService/Embed"

    def open(self, channel: grpc.aio.Channel) -> Any:
        """See `SlotRpc.open`."""
        stub: Any = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        return stub.Embed()

    def start(self, slot: int, request: EmbedRequest) -> embedding_pb2.EmbedRequest:
        """See `SlotRpc.start`."""
        return embed_to_proto(slot, request)

    def cancel(self, slot: int) -> embedding_pb2.EmbedRequest:
        """See `SlotRpc.cancel`."""
        return embedding_pb2.EmbedRequest(cancel=embedding_pb2.CancelEmbed(slot=slot))

    def nbytes(self, entry: Vectors) -> int:
        """See `SlotRpc.nbytes`."""
        return _ENTRY_BYTES + len(entry.values)

    def content(self, response: Any) -> Content:
        """See `SlotRpc.content`."""
        return embed_content(response)
