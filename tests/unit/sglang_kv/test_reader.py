"""The reader of SGLang's KV events, against a publisher that speaks as SGLang's does."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from millstream_server.engines.kv_reader import BatchOrder, RankReader
from millstream_server.engines.sglang.kv_events.translation import Translation
from millstream_server.kv_cache.events import BlocksRemoved, BlocksStored, CacheCleared, Medium
from millstream_server.kv_cache.hashing import Namespace, block_hashes
from tests.support.worker.kv_view import KvView

_PAGE = 4


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def _stored(tokens: Sequence[int], **fields: Any) -> dict[str, Any]:
    hashes = [_signed(each) for each in block_hashes(tokens, _PAGE)]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(tokens),
        "block_size": _PAGE,
        "lora_id": None,
        "medium": "GPU",
        **fields,
    }


def _removed(hashes: Sequence[int]) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [_signed(h) for h in hashes], "medium": "GPU"}


_CLEARED = {"type": "AllBlocksCleared"}


def _pack(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, events, 0])


class Publisher:
    """SGLang's publisher: a PUB socket that connects, and a ROUTER that replays a ring."""

    def __init__(self, context: zmq.Context[Any], events: str, replay: str, ring: int) -> None:
        self.pub = context.socket(zmq.PUB)
        self.pub.connect(events)
        self.router = context.socket(zmq.ROUTER)
        self.router.bind(replay)
        self.ring: deque[tuple[int, bytes]] = deque(maxlen=ring)
        self.number = -1
        self.replays = 0

    def publish(self, *events: Any, lose: bool = False) -> None:
        """Publish a batch, or only keep it for the replay."""
        self.number += 1
        self.ring.append((self.number, _pack(*events)))
        if not lose:
            self.send(self.number, self.ring[-1][1])

    def send(self, number: int, payload: bytes) -> None:
        self.pub.send_multipart([b"", number.to_bytes(8, "big"), payload])

    def serve_replays(self) -> None:
        """Answer the requests that have come."""
        while self.router.poll(0):
            client, _, start = self.router.recv_multipart()
            self.replays += 1
            for number, payload in self.ring:
                if number >= int.from_bytes(start, "big"):
                    head = [client, b"", b"", number.to_bytes(8, "big")]
                    self.router.send_multipart([*head, payload])
            self.router.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.serve_replays()
                await asyncio.sleep(0.001)

    def close(self) -> None:
        self.pub.close(linger=0)
        self.router.close(linger=0)


@contextlib.asynccontextmanager
async def _following(tmp_path: Path, ring: int = 100) -> AsyncIterator[tuple[Publisher, KvView]]:
    """A connected publisher, and the view of who follows it."""
    view = KvView()
    events, replay = f"ipc://{tmp_path}/tcp-events:0", f"ipc://{tmp_path}/tcp-replay:0"
    with zmq.Context() as context:
        reader = RankReader(
            context, events, replay, lambda found: view.changed(0, found), Translation()
        )
        publisher = Publisher(context, events, replay, ring)
        try:
            publisher.publish(_CLEARED)
            reader.catch_up()  # the connection may be later than the batch
            await publisher.until(lambda: view.cleared)
            while not view.ranks[0]:  # until the connection stands
                publisher.publish(_stored(range(4)))
                publisher.serve_replays()
                await asyncio.sleep(0.001)
            yield publisher, view
        finally:
            publisher.close()
            reader.close()


async def test_lost_doubled_and_reordered_batches_leave_the_right_view(tmp_path: Path) -> None:
    chance = random.Random(5)
    true: set[int] = set(block_hashes(range(4), _PAGE))
    async with _following(tmp_path) as (publisher, view):
        for step in range(1500):
            before = publisher.number
            match chance.choices(["store", "remove", "clear"], [60, 38, 2])[0]:
                case "store":
                    tokens = [step, chance.randint(0, 9), 2, 3] * chance.randint(1, 3)
                    true.update(block_hashes(tokens, _PAGE))
                    publisher.publish(_stored(tokens), lose=chance.random() < 0.1)
                case "remove" if true:
                    gone = chance.sample(sorted(true), min(len(true), chance.randint(1, 5)))
                    true.difference_update(gone)
                    publisher.publish(_removed(gone), lose=chance.random() < 0.1)
                case _:
                    true.clear()
                    publisher.publish(_CLEARED, lose=chance.random() < 0.1)
            if chance.random() < 0.2:
                publisher.send(*chance.choice(publisher.ring))  # again, or late
            assert publisher.number == before + 1
            if step % 50 == 49:
                publisher.publish(_stored([step] * 4))  # shows a gap at the end
                true.update(block_hashes([step] * 4, _PAGE))
                await publisher.until(lambda: view.ranks[0] == true)
        assert publisher.replays > 10
        cleared = view.cleared
        publisher.publish(_CLEARED)
        await publisher.until(lambda: view.cleared == cleared + 1)


async def test_what_cant_be_replayed_clears_the_view(tmp_path: Path) -> None:
    async with _following(tmp_path, ring=3) as (publisher, view):
        await publisher.until(lambda: view.ranks[0])
        cleared = view.cleared
        for start in range(10, 20):
            publisher.publish(_stored([start] * 4), lose=True)
        publisher.publish(_stored([99] * 4))
        known = {*block_hashes([18] * 4, 4), *block_hashes([19] * 4, 4), *block_hashes([99] * 4, 4)}
        await publisher.until(lambda: view.ranks[0] == known)
        assert view.cleared == cleared + 1


async def test_a_batch_that_cant_be_read_clears_the_view(tmp_path: Path) -> None:
    async with _following(tmp_path) as (publisher, view):
        cleared = view.cleared
        publisher.publish({"type": "Whatever"})
        publisher.publish(_stored([7] * 4))
        await publisher.until(lambda: view.ranks[0] == set(block_hashes([7] * 4, _PAGE)))
        assert view.cleared == cleared + 1


async def test_ranks_without_replay_go_on_after_a_gap(tmp_path: Path) -> None:
    view = KvView()
    events = f"ipc://{tmp_path}/tcp-events:0"
    with zmq.Context() as context:
        reader = RankReader(
            context, events, "", lambda found: view.changed(0, found), Translation()
        )
        pub = context.socket(zmq.PUB)
        pub.connect(events)
        number = 4
        async with asyncio.timeout(10):
            while not view.ranks[0]:
                number += 2  # each leaves a gap
                payload = _pack(_stored([number] * 4))
                pub.send_multipart([b"", number.to_bytes(8, "big"), payload])
                await asyncio.sleep(0.001)
        assert view.cleared
        pub.close(linger=0)
        reader.close()


def test_too_many_held_batches_are_seen() -> None:
    order = BatchOrder(most_held=3)
    for number in (2, 3, 4):
        assert not order.take(number, b"%d" % number)
    assert not order.full
    assert not order.take(9, b"9")
    assert order.full
    assert order.give_up() == [b"2", b"3", b"4"]
    assert (order.next, order.incomplete) == (5, True)
    assert order.take(4, b"again") == []
    assert order.give_up() == [b"9"]


# ---- what events mean ---------------------------------------------------------------------------


def test_each_kind_of_event_is_read() -> None:
    hashes = block_hashes(range(8), _PAGE)
    told = Translation().batch(_pack(_stored(range(8)), _removed(hashes[:1]), _CLEARED))
    assert told == [BlocksStored(hashes), BlocksRemoved(hashes[:1]), CacheCleared()]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("GPU", Medium.DEVICE),
        ("CPU_PINNED", Medium.HOST),
        ("DISK", Medium.DISK),
        ("EXTERNAL", Medium.EXTERNAL),
        (None, Medium.DEVICE),
    ],
)
def test_media(theirs: str | None, ours: Medium) -> None:
    (event,) = Translation().batch(_pack(_stored(range(4), medium=theirs)))
    assert isinstance(event, BlocksStored)
    assert event.medium is ours


def _theirs(adapter_id: str, hashes: Sequence[int]) -> list[int]:
    """SGLang's hashes of an adapter's blocks: nobody else knows the id."""
    seed = adapter_id.encode()
    digests = [sha256(seed + struct.pack(">Q", each)).digest() for each in hashes]
    return [int.from_bytes(digest[:8], "big", signed=True) for digest in digests]


def _of_adapter(load: str, tokens: Sequence[int], **fields: Any) -> dict[str, Any]:
    theirs = _theirs(load, block_hashes(tokens, _PAGE))
    return _stored(tokens, **{"block_hashes": theirs, "lora_name": "poet", **fields})


def test_an_adapters_blocks_get_hashes_that_anyone_can_compute() -> None:
    tokens = list(range(12))
    ours = block_hashes(tokens, _PAGE, Namespace("poet"))
    theirs = _theirs("1", block_hashes(tokens, _PAGE))
    translation = Translation()
    first = _of_adapter("1", tokens[:8])
    rest = {**_of_adapter("1", tokens), "block_hashes": theirs[2:], "token_ids": tokens[8:]}
    rest["parent_block_hash"] = theirs[1]
    assert translation.batch(_pack(first, rest)) == [
        BlocksStored(ours[:2], None, Medium.DEVICE, "poet"),
        BlocksStored(ours[2:], ours[1], Medium.DEVICE, "poet"),
    ]
    plain = block_hashes([5] * 4, _PAGE)
    gone = {"type": "BlockRemoved", "block_hashes": [theirs[2], _signed(plain[0])]}
    assert translation.batch(_pack(gone)) == [BlocksRemoved([plain[0], ours[2]])]
    salted = _of_adapter("1", tokens[:4], cache_salt="s", block_hashes=[1])
    (event,) = translation.batch(_pack(salted))
    assert event == BlocksStored(
        block_hashes(tokens[:4], _PAGE, Namespace("poet", "s")), None, Medium.DEVICE, "poet"
    )


def test_a_block_counts_until_the_last_load_of_its_adapter_has_lost_it() -> None:
    tokens = list(range(4))
    ours = block_hashes(tokens, _PAGE, Namespace("poet"))
    translation = Translation()
    loads = [_of_adapter(load, tokens) for load in "12"]
    translation.batch(_pack(*loads, loads[0]))
    first, second = (
        {"type": "BlockRemoved", "block_hashes": each["block_hashes"]} for each in loads
    )
    assert translation.batch(_pack(first)) == []
    assert translation.batch(_pack(second)) == [BlocksRemoved(ours)]


def test_an_unloaded_adapters_blocks_are_gone() -> None:
    tokens = list(range(8))
    ours = block_hashes(tokens, _PAGE, Namespace("poet"))
    translation = Translation()
    translation.batch(_pack(_of_adapter("1", tokens), _stored(tokens)))
    assert translation.without("painter") == []
    assert translation.without("poet") == [BlocksRemoved(ours)]
    assert translation.without("poet") == []
    translation.batch(_pack(_of_adapter("2", tokens)))
    late = {"type": "BlockRemoved", "block_hashes": _of_adapter("1", tokens)["block_hashes"]}
    (event,) = translation.batch(_pack(late))
    assert isinstance(event, BlocksRemoved)
    assert not set(event.hashes) & set(ours), "the blocks of the new load stay"


def test_after_a_loss_blocks_of_unknown_parents_are_not_told() -> None:
    tokens = list(range(8))
    translation = Translation()
    translation.batch(_pack(_of_adapter("1", tokens)))
    translation.cleared()
    theirs = _theirs("1", block_hashes(tokens, _PAGE))
    child = _of_adapter("1", tokens[:4], parent_block_hash=theirs[1], block_hashes=[3])
    assert translation.batch(_pack(child)) == []
