"""EncodeService: one long-lived Encode stream per Processor, one Fetch per tensor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from millstream.v1 import encode_pb2, encode_pb2_grpc
from millstream_server.protobuf.encode import file_from_proto
from millstream_server.protobuf.errors import error_to_proto
from millstream_server.protobuf.media import ref_to_proto
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.slot_session import (
    CancelSlot,
    SlotContent,
    SlotSession,
    StartSlot,
    TellSlot,
)
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.worker.embeddings.serve import EmbeddingServer
from millstream_server.worker.encoding.core import EncodeRequest, EncodeWorker, LeasedItem
from millstream_server.worker.encoding.upload import Upload

SERVICE = "millstream.v1.EncodeService"
STREAM = f"{SERVICE}/Encode"


class _Stream:
    """The `SlotService` of one stream; it owns the leases of its results."""

    def __init__(self, worker: EncodeWorker) -> None:
        self.work = worker.work
        self.streams = worker.streams
        self.run = worker.run
        self._worker = worker

    def control(
        self, message: encode_pb2.EncodeRequest
    ) -> StartSlot[EncodeRequest] | TellSlot[EncodeRequest] | CancelSlot | None:
        match message.WhichOneof("control"):
            case "start":
                start = message.start
                return StartSlot(start.slot, lambda trace: self._read(start, trace))
            case "more":
                # Bytes of a slot that has just failed may still be on their way: no error.
                more = message.more
                return TellSlot(more.slot, lambda item: item.upload.more(more.data))
            case "cancel":
                return CancelSlot(message.cancel.slot)
            case "release":
                self._worker.leases.release(message.release.lease)
                return None
            case _:
                raise InvalidRequestError.of("control", "set one of start, more, cancel, release")

    def _read(self, start: encode_pb2.EncodeItem, trace: TraceContext) -> EncodeRequest:
        file = file_from_proto(start, trace)
        upload = Upload(start.total_bytes, file.data, self._worker.upload_idle_s)
        return EncodeRequest(file, upload, self)

    def response(self, content: SlotContent[None, LeasedItem]) -> encode_pb2.EncodeResponse:
        return encode_pb2.EncodeResponse(
            encoded=[
                encode_pb2.EncodedItem(
                    slot=slot, ref=ref_to_proto(leased.item, leased.lease.left_s)
                )
                for slot, leased in content.finished
            ],
            errors=[
                encode_pb2.EncodeError(slot=slot, error=error_to_proto(error))
                for slot, error in content.errors
            ],
            wanted=[slot for slot, _ in content.latest],
            draining=content.draining,
        )


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """Serves EncodeService from one encoder."""

    def __init__(self, worker: EncodeWorker, embeddings: EmbeddingServer | None) -> None:
        """Encode items on ``worker``; ``embeddings`` hands results out, None: nobody gets any."""
        self._worker = worker
        self._embeddings = embeddings

    async def Encode(
        self, request_iterator: AsyncIterator[encode_pb2.EncodeRequest], call: Call
    ) -> AsyncIterator[encode_pb2.EncodeResponse]:
        """Encode one stream's items; see encode.proto for the rules."""
        stream = _Stream(self._worker)
        session = SlotSession(stream)
        try:
            async with contextlib.aclosing(session.responses(request_iterator)) as responses:
                async for response in responses:
                    yield response
        finally:
            self._worker.leases.release_all(stream)

    async def Fetch(
        self, request_iterator: AsyncIterator[encode_pb2.FetchRequest], call: Call
    ) -> AsyncIterator[encode_pb2.FetchResponse]:
        """Hand one result out; a drain waits for it."""
        if self._embeddings is None:
            raise UnsupportedFeatureError(
                "this worker encodes for its own prompts only: nobody else can fetch its results"
            )
        with self._worker.work.track():
            responses = self._embeddings.fetch(request_iterator, call)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response
