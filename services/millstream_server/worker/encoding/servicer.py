"""EncodeService: one long-lived Encode stream per Processor, one Fetch per tensor."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from millstream.v1 import encode_pb2, encode_pb2_grpc
from millstream_server.runtime.errors import UnsupportedFeatureError
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.embeddings.serve import EmbeddingServer
from millstream_server.worker.encoding.session import EncodeSession
from millstream_server.worker.encoding.slot import ItemRunner

SERVICE = "millstream.v1.EncodeService"
STREAM = f"{SERVICE}/Encode"


class EncodeServicer(encode_pb2_grpc.EncodeServiceServicer):
    """Serves EncodeService from one encoder."""

    def __init__(self, runner: ItemRunner, embeddings: EmbeddingServer | None) -> None:
        """Encode items on ``runner``; ``embeddings`` hands results out, None: nobody gets any."""
        self._runner = runner
        self._embeddings = embeddings

    async def Encode(
        self, request_iterator: AsyncIterator[encode_pb2.EncodeRequest], call: Call
    ) -> AsyncIterator[encode_pb2.EncodeResponse]:
        """Encode one stream's items; see encode.proto for the rules."""
        session = EncodeSession(self._runner)
        with session.reading(request_iterator):
            while (response := await session.next()) is not None:
                yield response

    async def Fetch(
        self, request_iterator: AsyncIterator[encode_pb2.FetchRequest], call: Call
    ) -> AsyncIterator[encode_pb2.FetchResponse]:
        """Hand one result out; a drain waits for it."""
        if self._embeddings is None:
            raise UnsupportedFeatureError(
                "this worker encodes for its own prompts only: nobody else can fetch its results"
            )
        with self._runner.work.track():
            responses = self._embeddings.fetch(request_iterator, call)
            async with contextlib.aclosing(responses):
                async for response in responses:
                    yield response
