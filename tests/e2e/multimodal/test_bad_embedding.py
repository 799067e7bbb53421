"""An embedding that doesn't fit its placeholders would end SGLang; workers refuse it before.

No client can make one. Here the worker's own stream gets tickets that the suite's key signed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import grpc
import pytest

from millstream.v1 import (
    decode_pb2_grpc,
    encode_pb2,
    encode_pb2_grpc,
    prefill_pb2_grpc,
    tensor_pb2,
)
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.sampling import Sampling
from millstream_server.generation.ticket import Ticket, TicketKey
from millstream_server.media.items import EmbeddingTicket, EncodedItem, Modality
from millstream_server.protobuf.media import ref_from_proto
from tests.e2e.multimodal.conftest import Suite, talking
from tests.support.media.reference_media import Case
from tests.support.media.vision_chats import File, Question, ask, check, photo
from tests.support.processes.suite import TICKET_KEY
from tests.support.worker import encode_worker
from tests.support.worker.worker_streams import SlotView, Stream, decode_stream, prefill_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_KEY = TicketKey.from_hex(TICKET_KEY)
_PICTURE, _ROW_LESS = photo(96, 96, seed=51), photo(128, 64, seed=52)
"""9 and 8 rows."""
_QUESTION = Question.of("What is this? ", _PICTURE, " Answer.")


@dataclass
class Raw:
    """The streams of a worker that runs prompts, and of the encode worker."""

    suite: Suite
    stream: Stream
    encode: encode_worker.Stream
    handoff: Ticket | None
    slot: int = 0

    async def encoded(self, file: File) -> EncodedItem:
        """Encode a picture; it is leased as long as the stream is open."""
        self.slot += 1
        await self.encode.start(self.slot, file.data)
        return ref_from_proto(await self.encode.encoded(self.slot), Modality.IMAGE)

    def mint(self, item: EncodedItem, address: str = "") -> EmbeddingTicket:
        """Sign a ticket for ``item``, as a Processor does."""
        return EmbeddingTickets(_KEY).mint(address or self.suite.encode.address, item)

    async def generate(self, case: Case, ticket: EmbeddingTicket, digest: bytes) -> SlotView:
        """Run the case's prompt with the embedding that the ticket names."""
        self.slot += 1
        (item,) = case.prompt.media
        media = (replace(item, ticket=ticket, tensor=None, digest=digest),)
        request = GenerationRequest(
            request_id="raw",
            prompt=replace(case.prompt, media=media),
            sampling=Sampling(max_new_tokens=8, temperature=0, ignore_eos=True),
            ticket=self.handoff,
        )
        await self.stream.start_request(self.slot, request)
        (view,) = await self.stream.ended(self.slot)
        return view


@pytest.fixture(params=["aggregated", "prefill"])
async def raw(request: pytest.FixtureRequest, suite: Suite) -> AsyncIterator[Raw]:
    address = getattr(suite, request.param).address
    async with (
        grpc.aio.insecure_channel(address) as channel,
        grpc.aio.insecure_channel(suite.encode.address) as encode_channel,
    ):
        encode = encode_worker.Stream(encode_channel)
        try:
            if request.param == "prefill":
                stream = prefill_stream(prefill_pb2_grpc.PrefillServiceStub(channel))
                port = int(str(suite.prefill.flags["bootstrap_port"]))
                yield Raw(suite, stream, encode, _KEY.mint("127.0.0.1", port))
            else:
                stream = decode_stream(decode_pb2_grpc.DecodeServiceStub(channel))
                yield Raw(suite, stream, encode, None)
        finally:
            await encode.close()


async def lives(raw: Raw, case: Case) -> None:
    """The next requests get their answers, on the same stream and through the Processors."""
    item = await raw.encoded(_PICTURE)
    if raw.handoff is None:
        good = await raw.generate(case, raw.mint(item), item.digest)
        assert good.token_ids == case.token_ids
    for address in (raw.suite.front.address, raw.suite.front_aggregated.address):
        async with talking(address) as stub:
            check(await ask(stub, _QUESTION), case)


async def test_a_tensor_with_one_row_too_few_is_refused(raw: Raw) -> None:
    case = _QUESTION.case(raw.suite.model)
    item = await raw.encoded(_ROW_LESS)
    refused = await raw.generate(case, raw.mint(item), item.digest)
    assert refused.reason == "INVALID_REQUEST"
    assert refused.error is not None
    (violation,) = refused.error.violations
    assert violation.field == "media[0].ticket.tensor.shape"
    assert violation.description == "is [8, 256]; 9 tokens of this model need [9, 256]"
    await lives(raw, case)


async def test_a_lease_with_other_rows_than_its_ticket_says_is_refused(raw: Raw) -> None:
    case = _QUESTION.case(raw.suite.model)
    item, row_less = await raw.encoded(_PICTURE), await raw.encoded(_ROW_LESS)
    ticket = raw.mint(replace(row_less, tensor=item.tensor))
    refused = await raw.generate(case, ticket, item.digest)
    assert (refused.reason, refused.fields) == ("INVALID_REQUEST", ["ticket"])
    await lives(raw, case)


async def test_a_ticket_of_another_key_is_refused(raw: Raw) -> None:
    case = _QUESTION.case(raw.suite.model)
    item = await raw.encoded(_PICTURE)
    forged = replace(raw.mint(item), signature=bytes(32))
    refused = await raw.generate(case, forged, item.digest)
    assert (refused.reason, refused.fields) == ("INVALID_REQUEST", ["ticket.signature"])
    await lives(raw, case)


class Liar(encode_pb2_grpc.EncodeServiceServicer):
    """An encode worker that offers a tensor, and sends a row less."""

    async def Encode(self, requests: Any, context: Any) -> AsyncIterator[encode_pb2.EncodeResponse]:
        async for _ in requests:
            yield encode_pb2.EncodeResponse()

    async def Fetch(self, requests: Any, context: Any) -> AsyncIterator[encode_pb2.FetchResponse]:
        start = (await anext(requests)).start
        rows, width = start.ticket.tensor.shape
        offer = encode_pb2.FetchOffer(total_bytes=rows * width * 4, inline=encode_pb2.InlineBytes())
        yield encode_pb2.FetchResponse(offer=offer)
        chunk = tensor_pb2.TensorChunk(offset=0, data=bytes((rows - 1) * width * 4))
        yield encode_pb2.FetchResponse(chunk=chunk)


@contextlib.asynccontextmanager
async def lying() -> AsyncIterator[str]:
    server = grpc.aio.server()
    encode_pb2_grpc.add_EncodeServiceServicer_to_server(Liar(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_row_less_on_the_way_fails_the_request_alone(raw: Raw) -> None:
    case = _QUESTION.case(raw.suite.model)
    item = await raw.encoded(_PICTURE)
    async with lying() as address:
        failed = await raw.generate(case, raw.mint(item, address), item.digest)
    assert failed.reason == "EMBEDDING_TRANSFER_FAILED"
    await lives(raw, case)
