"""What is taken in before it is encoded: the memory that it counts, whatever happens to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from millstream_server.media.items import Modality
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.text.messages import MediaPart
from millstream_server.runtime.errors import MediaFetchError, OverloadedError
from millstream_server.runtime.rpc.ledger import Hold
from millstream_testing.waiting import until
from tests.support.media import media_files

PICTURE = media_files.solid(size=(56, 56), color="red")


class Urls:
    """A server that sends a hundred bytes at a time, until the test says how it ends."""

    def __init__(self) -> None:
        self.end = asyncio.get_running_loop().create_future()

    async def fetch(self, url: str, field: str, take: Callable[[int], None]) -> bytes:
        for _ in range(3):
            take(100)
        data: bytes = await self.end
        return data


def prepare(urls: Any, hold: Hold, part: MediaPart) -> asyncio.Task[None]:
    intake = Intake(urls, max_item_bytes=1 << 20, max_items=4)
    return asyncio.create_task(intake.prepare([part], frozenset(Modality), hold))


def linked() -> MediaPart:
    return MediaPart(Modality.IMAGE, "field", url="http://example.com/a.png")


async def test_bytes_of_a_url_count_as_they_come_and_no_more_when_it_fails() -> None:
    budget, urls = MediaBudget(1000), Urls()
    preparing = prepare(urls, Hold(budget), linked())
    await until(lambda: budget.used == 300)
    urls.end.set_exception(MediaFetchError("field: its server did not deliver it"))
    with pytest.raises(MediaFetchError):
        await preparing
    assert budget.used == 0


async def test_a_url_that_would_exceed_the_budget_is_stopped() -> None:
    budget = MediaBudget(250)
    with pytest.raises(OverloadedError, match="fill the 250 bytes"):
        await prepare(Urls(), Hold(budget), linked())
    assert budget.used == 0


async def test_a_fetch_that_ends_after_its_conversation_frees_nothing_twice() -> None:
    budget, urls = MediaBudget(1000), Urls()
    hold = Hold(budget)
    preparing = prepare(urls, hold, linked())
    await until(lambda: budget.used == 300)
    hold.close()
    preparing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await preparing
    assert budget.used == 0


async def test_an_upload_in_pieces_is_joined() -> None:
    budget = MediaBudget(1000)
    part = MediaPart(Modality.IMAGE, "field", pieces=[PICTURE[:50], PICTURE[50:]])
    await prepare(Urls(), Hold(budget), part)
    assert (part.data, part.pieces) == (PICTURE, ())
    assert len(part.sha256) == 32
