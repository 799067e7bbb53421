"""Requests with images on real streams: tensors from a real store, output worked out by hand."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator

import grpc
import pytest

from millstream.v1 import generation_pb2
from millstream_server.control.engine import Role
from millstream_server.encode.fetching.fetch import EmbeddingFetcher
from millstream_server.encode.transfer.store import EmbeddingStore, Leases
from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.engines.simulated.state import of_digests, of_tensors
from millstream_server.generation.request import GenerationRequest
from millstream_server.media.items import EncodedItem, MediaInput, Modality
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_testing.in_process import KEY, worker
from tests.support.media.media_requests import MODEL, fetched, geometry_only, item, request, tensor
from tests.support.worker.worker_streams import decode_stream, prefill_stream

VOCAB_SIZE = 100
CONFIG = SimulatedConfig(vocab_size=VOCAB_SIZE, context_length=64, media=MODEL)
OWNER = "test"


class Hanging:
    """A fetcher whose encode workers never send a byte."""

    tracing: Tracing | None = None

    async def fetch(self, *_: object) -> Tensor:
        """Wait until cancelled."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError


class Encoded:
    """A store with tensors, and a worker's fetcher that reads them."""

    def __init__(self) -> None:
        self.store = EmbeddingStore(1 << 20)
        self.leases = Leases(self.store, 60)
        self.tickets = EmbeddingTickets(KEY)
        self.fetcher = EmbeddingFetcher(self.tickets, local=self.leases)

    def ticketed(self, asked: GenerationRequest) -> GenerationRequest:
        """Encode the request's items, and sign tickets for them."""
        return dataclasses.replace(
            asked,
            prompt=dataclasses.replace(
                asked.prompt, media=tuple(map(self._ticketed, asked.prompt.media))
            ),
        )

    def _ticketed(self, one: MediaInput) -> MediaInput:
        assert one.ticket is not None
        made = tensor(one.ticket.lease, one.ticket.tensor.shape)
        lease = self.leases.grant(self.store.put(one.digest, made, None), OWNER)
        encoded = EncodedItem(
            modality=one.modality,
            digest=one.digest,
            tokens=one.tokens,
            geometry=one.geometry,
            tensor=made.spec,
            content=one.content,
            lease=lease.name,
        )
        return dataclasses.replace(one, ticket=self.tickets.mint("encode:1", encoded))


@pytest.fixture
async def encoded() -> AsyncIterator[Encoded]:
    made = Encoded()
    yield made
    await made.fetcher.close()
    made.leases.close()
    assert made.store.pinned_bytes == 0
    made.store.close()


def by_hand(asked: GenerationRequest) -> list[int]:
    """Work out the tokens, from the rule in `engines.simulated.state`."""
    media = fetched(asked).prompt.media
    step = 1 + of_digests(media) + of_tensors(media)
    last = asked.token_ids[-1]
    return [(last + n * step) % VOCAB_SIZE for n in range(1, 5)]


TWO = request(item("a", 2), item("b", 8))
OTHER = request(item("c", 2), item("v", 8, 12, modality=Modality.VIDEO))


async def test_an_aggregated_worker(encoded: Encoded) -> None:
    async with worker(CONFIG, fetcher=encoded.fetcher) as w:
        stream = decode_stream(w.decode)
        for slot, asked in enumerate((TWO, OTHER, request())):
            await stream.start_request(slot, encoded.ticketed(asked))
        views = await stream.ended(0, 1, 2)
        for view, asked, media_tokens in zip(
            views, (TWO, OTHER, request()), (4, 6, 0), strict=True
        ):
            assert view.token_ids == by_hand(asked)
            assert view.finish is not None
            assert view.finish.usage.media_tokens == media_tokens
            assert view.finish.usage.prompt_tokens == 20
        await stream.drain()
        await w.until_idle()


async def test_a_pair(encoded: Encoded) -> None:
    prefill_config = dataclasses.replace(CONFIG, role=Role.PREFILL)
    decode_config = dataclasses.replace(CONFIG, role=Role.DECODE)
    async with worker(prefill_config, fetcher=encoded.fetcher) as p, worker(decode_config) as d:
        info = p.host.loaded()
        first, second = prefill_stream(p.prefill), decode_stream(d.decode)
        for slot, asked in enumerate((TWO, OTHER)):
            ticket = KEY.mint(info.bootstrap_host, info.bootstrap_port)
            signed = dataclasses.replace(encoded.ticketed(asked), ticket=ticket)
            await first.start_request(slot, signed)
            await second.start_request(slot, geometry_only(signed))
        for view, asked in zip(await second.ended(0, 1), (TWO, OTHER), strict=True):
            assert view.token_ids == by_hand(asked)
        for view in await first.ended(0, 1):
            assert view.finish is not None
            assert view.finish.usage.media_tokens > 0
        await first.drain()
        await second.drain()


async def test_what_cannot_be_fetched_fails_its_slot_alone(encoded: Encoded) -> None:
    forged = TWO  # its tickets have no signature
    unknown = encoded.ticketed(TWO)
    encoded.leases.release_all(OWNER)  # such as after the encode worker's restart
    async with worker(CONFIG, fetcher=encoded.fetcher) as w:
        stream = decode_stream(w.decode)
        await stream.start_request(0, forged)
        await stream.start_request(1, unknown)
        await stream.start_request(2, encoded.ticketed(OTHER))
        views = await stream.ended(0, 1, 2)
        assert views[0].reason == "INVALID_REQUEST"
        assert views[0].fields == ["ticket.signature"]
        assert views[1].reason == "EMBEDDING_TRANSFER_FAILED"
        assert views[1].error is not None
        assert views[1].error.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert views[2].token_ids == by_hand(OTHER)
        await stream.drain()


async def test_refusals_name_the_item(encoded: Encoded) -> None:
    async with worker(CONFIG, fetcher=encoded.fetcher) as w, worker(CONFIG) as text_only:
        stream = decode_stream(w.decode)
        good = encoded.ticketed(TWO)
        longer = dataclasses.replace(good.prompt.media[1], digest=b"short")
        media = (good.prompt.media[0], longer)
        bad = dataclasses.replace(good, prompt=dataclasses.replace(good.prompt, media=media))
        await stream.start_request(0, bad)
        stray = request()
        stray.prompt.token_ids[5] = MODEL.soft_tokens[Modality.IMAGE]  # type: ignore[index]
        await stream.start_request(1, stray)
        views = await stream.ended(0, 1)
        assert [view.reason for view in views] == ["INVALID_REQUEST"] * 2
        assert [view.fields for view in views] == [["media[1].digest"], ["token_ids[5]"]]
        await stream.drain()
        other = decode_stream(text_only.decode)
        await other.start_request(0, good)
        (view,) = await other.ended(0)
        assert (view.reason, view.fields) == ("UNSUPPORTED_FEATURE", ["media"])
        await other.drain()


async def test_n_choices_share_a_prompt_and_its_tickets(encoded: Encoded) -> None:
    """A Processor makes n requests of one; each is fetched and seeded on its own."""
    async with worker(CONFIG, fetcher=encoded.fetcher) as w:
        stream = decode_stream(w.decode)
        asked = encoded.ticketed(TWO)
        for slot in range(4):
            sampling = dataclasses.replace(asked.sampling, seed=slot)
            await stream.start_request(
                slot, dataclasses.replace(asked, sampling=sampling, engine_id=f"{slot:032x}")
            )
        for view in await stream.ended(0, 1, 2, 3):
            assert view.token_ids == by_hand(TWO)
        await stream.drain()


async def test_a_cancel_while_a_fetch_hangs(encoded: Encoded) -> None:
    async with worker(CONFIG, fetcher=Hanging()) as w:
        stream = decode_stream(w.decode)
        await stream.start_request(0, encoded.ticketed(TWO))
        await stream.start(1, [1, 2], max_new_tokens=1)
        await stream.ended(1)  # a text request beside it isn't held up
        assert w.host.work.count == 1
        await stream.cancel(0)
        (view,) = await stream.ended(0)
        assert view.finish is not None
        assert view.finish.reason == generation_pb2.FINISH_REASON_CANCELLED
        assert view.finish.usage.completion_tokens == 0
        assert view.finish.usage.media_tokens == 4
        await stream.drain()
        assert w.host.work.count == 0
