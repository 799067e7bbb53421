"""Shared memory: what is mapped, what is refused, what is swept."""

from __future__ import annotations

import mmap
import os
import re
import socket
import time
from pathlib import Path

import pytest

from millstream_server.encode.transfer import shared_memory
from millstream_server.encode.transfer.arena import Arena, is_sealed
from millstream_server.encode.transfer.shared_memory import (
    SharedMemoryReceiver,
    SharedMemorySender,
    domain,
    sweep,
)
from millstream_server.encode.transfer.store import EmbeddingStore, Stored
from millstream_server.encode.transfer.ways import Abilities, SharedMemoryOffer, WayError
from millstream_server.media.tensor import ElementType, Tensor, TensorSpec
from tests.support.media.embeddings import names_in_shared_memory

NAME = "millstream-" + "0123456789abcdef" * 2
SPEC = TensorSpec(ElementType.FLOAT32, (64,))


@pytest.fixture
def stored() -> Stored:
    store = EmbeddingStore(1024)
    return store.put(b"a", Tensor(SPEC, memoryview(bytes(range(256)))), None)


def here(*segments: str) -> Abilities:
    return Abilities(shared_memory_domain=domain(), open_segments=segments)


async def offered(stored: Stored) -> SharedMemoryOffer:
    opening = await SharedMemorySender(stored.arena).open(stored, here())
    assert opening
    assert isinstance(opening.offer, SharedMemoryOffer)
    return opening.offer


async def test_the_name_lives_until_somebody_has_connected(stored: Stored) -> None:
    offer = await offered(stored)
    assert re.fullmatch("millstream-[0-9a-f]{32}", offer.name)
    assert names_in_shared_memory() == {offer.name}
    assert (shared_memory.FOLDER / offer.name).stat().st_mode & 0o777 == 0o600
    receiver = SharedMemoryReceiver()
    assert await receiver.read(offer, 256) == bytes(range(256))
    assert names_in_shared_memory() == set()
    assert receiver.open_segments == (offer.segment,)
    again = await SharedMemorySender(stored.arena).open(stored, here(offer.segment))
    assert again
    assert isinstance(again.offer, SharedMemoryOffer)
    assert again.offer.name == ""
    receiver.close()
    assert not receiver.open_segments


async def test_the_sender_removes_the_name(stored: Stored) -> None:
    opening = await SharedMemorySender(stored.arena).open(stored, here())
    assert opening
    opening.close()
    opening.close()
    assert names_in_shared_memory() == set()


async def test_another_machine_gets_no_offer(stored: Stored) -> None:
    sender = SharedMemorySender(stored.arena)
    for other in ("", "another"):
        assert await sender.open(stored, Abilities(shared_memory_domain=other)) is None


@pytest.mark.parametrize(("offset", "nbytes"), [(1024, 1), (769, 256), (1 << 62, 1)])
async def test_a_range_outside_the_segment(stored: Stored, offset: int, nbytes: int) -> None:
    good = await offered(stored)
    bad = SharedMemoryOffer(good.segment, good.name, good.segment_size_bytes, offset)
    with pytest.raises(WayError) as caught:
        await SharedMemoryReceiver().read(bad, nbytes)
    assert caught.value.cause == "range"


async def test_a_segment_of_another_size(stored: Stored) -> None:
    good = await offered(stored)
    with pytest.raises(WayError) as caught:
        await SharedMemoryReceiver().read(
            SharedMemoryOffer(good.segment, good.name, 2048, good.offset), 256
        )
    assert caught.value.cause == "segment"
    assert names_in_shared_memory() == set()


@pytest.mark.parametrize(
    "name", ["", "x", NAME[:-1], NAME + "/x", NAME + "\n", "../" + NAME, NAME.upper()]
)
async def test_a_name_that_no_sender_makes(name: str) -> None:
    with pytest.raises(WayError) as caught:
        await SharedMemoryReceiver().read(SharedMemoryOffer("s", name, 1024, 0), 256)
    assert caught.value.cause == "name"


async def test_a_name_that_is_gone() -> None:
    with pytest.raises(WayError) as caught:
        await SharedMemoryReceiver().read(SharedMemoryOffer("s", NAME, 1024, 0), 256)
    assert caught.value.cause == "open"


def test_nobody_else_can_write_to_an_arena_or_shorten_it() -> None:
    arena = Arena(4096)
    assert arena.fd is not None
    assert is_sealed(arena.fd)
    for forbidden in (
        lambda: os.ftruncate(arena.fd or 0, 0),
        lambda: os.write(arena.fd or 0, b"x"),
        lambda: mmap.mmap(arena.fd or 0, 4096),
    ):
        with pytest.raises(OSError, match=r".*"):
            forbidden()
    arena.close()
    with Path("/proc/self/status").open() as file:
        assert not is_sealed(file.fileno())


def test_only_old_sockets_of_ours_are_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path may have 107 bytes
    old = time.time() - 120
    for name in (NAME, "millstream-" + "a" * 32, "millstream-other"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bound:
            bound.bind(name)
        if name != "millstream-" + "a" * 32:
            os.utime(tmp_path / name, (old, old))
    file = tmp_path / ("millstream-" + "b" * 32)
    file.write_text("somebody's")
    os.utime(file, (old, old))
    assert sweep(tmp_path) == 1
    assert not (tmp_path / NAME).exists()
    assert len(list(tmp_path.iterdir())) == 3
    assert sweep(tmp_path / "missing") == 0
