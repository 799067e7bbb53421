"""Files in chunks: the rules, and the memory they take."""

from __future__ import annotations

import time

import pytest

from millstream.v1 import media_pb2, processor_pb2
from millstream_server.processor.convert import held_bytes
from millstream_server.processor.media.uploads import (
    IDLE_S,
    MAX_UPLOADS,
    MIN_BYTES_PER_S,
    MediaBudget,
    Uploads,
)
from millstream_server.runtime.errors import InvalidRequestError, OverloadedError


def uploads(max_bytes: int = 1000, max_item_bytes: int = 100) -> tuple[Uploads, MediaBudget]:
    budget = MediaBudget(max_bytes)
    return Uploads(budget, max_item_bytes), budget


def test_chunks_of_several_uploads_may_alternate() -> None:
    found, budget = uploads()
    found.add("a", b"12", 4)
    found.add("b", b"xyz", 3)
    found.add("a", b"34", 0)
    assert found.take("a", "image") == [b"1234"]
    assert found.take("b", "image") == [b"xyz"]
    assert budget.used == 7
    found.hold.close()
    assert budget.used == 0


def test_an_upload_is_used_once() -> None:
    found, _ = uploads()
    found.add("a", b"1", 1)
    found.take("a", "image")
    with pytest.raises(InvalidRequestError, match="image: names no upload of this stream"):
        found.take("a", "image")


def test_an_upload_must_be_complete() -> None:
    found, _ = uploads()
    found.add("a", b"123", 9)
    with pytest.raises(InvalidRequestError, match="only 3 of its 9 bytes have come"):
        found.take("a", "image")


@pytest.mark.parametrize(
    ("upload_id", "data", "total", "sentence"),
    [
        ("", b"1", 1, "upload_id: must have 1 to 128 bytes"),
        ("x" * 129, b"1", 1, "upload_id: must have 1 to 128 bytes"),
        ("a", b"1", 0, "total_bytes: must be from 1 to 100 in an upload's first chunk, not 0"),
        ("a", b"1", 101, "total_bytes: must be from 1 to 100 in an upload's first chunk, not 101"),
        ("a", b"", 1, "data: must not be empty"),
        ("a", b"12", 1, "data: 2 bytes have come of an upload that announced 1"),
    ],
)
def test_a_chunk_that_breaks_the_rules_takes_no_memory(
    upload_id: str, data: bytes, total: int, sentence: str
) -> None:
    found, budget = uploads()
    with pytest.raises(InvalidRequestError) as refused:
        found.add(upload_id, data, total)
    assert refused.value.message == f"media_chunk.{sentence}"
    assert budget.used == 0


def test_uploads_that_no_message_names_are_bounded() -> None:
    found, _ = uploads()
    for number in range(MAX_UPLOADS):
        found.add(str(number), b"1", 1)
    with pytest.raises(InvalidRequestError, match="64 uploads wait already"):
        found.add("one more", b"1", 1)


def test_memory_is_taken_as_chunks_come_not_when_announced() -> None:
    budget = MediaBudget(100)
    first, second = (Uploads(budget, 100) for _ in range(2))
    first.add("a", b"1" * 10, 100)
    second.add("a", b"1" * 90, 100)
    with pytest.raises(OverloadedError, match="fill the 100 bytes"):
        first.add("a", b"1", 0)
    second.hold.close()
    first.add("a", b"1" * 90, 0)
    assert first.take("a", "image") == [b"1" * 100]


def test_a_client_may_be_slow_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    found, _ = uploads(max_bytes=1 << 30, max_item_bytes=1 << 20)
    assert found.left_s is None
    found.add("a", b"1", 1 + 2 * MIN_BYTES_PER_S)
    assert found.left_s == pytest.approx(IDLE_S, abs=0.001)
    now += IDLE_S - 1
    found.add("b", bytes(MIN_BYTES_PER_S), MIN_BYTES_PER_S)  # complete: it counts for both
    assert found.left_s == pytest.approx(2, abs=0.001)
    now += 3
    assert found.left_s == 0
    assert str(found.too_slow()).startswith(f"{2 * MIN_BYTES_PER_S} bytes of uploads are missing")
    found.add("a", bytes(2 * MIN_BYTES_PER_S), 0)
    assert found.left_s is None
    now += 1000  # the next one has its own time
    found.add("c", b"1", 2)
    assert found.left_s == pytest.approx(IDLE_S, abs=0.001)


def test_large_chunks_are_not_copied_and_small_ones_put_together() -> None:
    found, _ = uploads(1 << 20, 1 << 20)
    large, small = b"1" * (100 << 10), b"2" * (20 << 10)
    found.add("a", large, 282 << 10)
    for _ in range(4):
        found.add("a", small, 0)
    found.add("a", b"3" * (2 << 10), 0)
    found.add("a", large, 0)  # behind small ones: put together with them
    pieces = found.take("a", "image")
    assert pieces[0] is large
    assert [len(piece) >> 10 for piece in pieces] == [100, 80, 102]
    assert b"".join(pieces) == large + small * 4 + b"3" * (2 << 10) + large


def test_chunks_count_as_media_and_not_as_messages_too() -> None:
    chunk = media_pb2.MediaChunk(upload_id="a", data=b"1" * 100, total_bytes=100)
    assert held_bytes(processor_pb2.ChatRequest(media_chunk=chunk)) == 0
    start = processor_pb2.ChatRequest(start=processor_pb2.ChatStart(request_id="r" * 50))
    assert held_bytes(start) == start.ByteSize() > 50
