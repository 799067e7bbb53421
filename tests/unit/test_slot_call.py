"""One request's entries at the Processor, between the worker's stream and whoever reads them."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_server.links.slot_stream import SlotCall
from millstream_server.runtime.errors import WorkerLostError


def _call() -> SlotCall[str, str]:
    stream: Any = None  # only a cancel needs it
    return SlotCall(stream, 0)


async def test_of_entries_that_may_be_skipped_the_last_before_another_is_kept() -> None:
    call = _call()
    for step in ("1", "2", "3"):
        call.add(step, latest=True)
    call.add("chunk", latest=False)
    call.add("4", latest=True)
    call.finish("end")
    assert [entry async for entry, _ in call.entries()] == ["3", "chunk", "4"]
    assert call.end == "end"


async def test_entries_come_before_the_failure() -> None:
    call = _call()
    call.add("chunk", latest=False)
    call.fail(WorkerLostError("gone"))
    entries = call.entries()
    assert await anext(entries) == ("chunk", False)
    with pytest.raises(WorkerLostError):
        await anext(entries)


@pytest.mark.parametrize("early", [True, False])
def test_the_end_is_told_also_if_nobody_reads(*, early: bool) -> None:
    call = _call()
    ended: list[bool] = []
    if early:
        call.when_ended(lambda: ended.append(True))
        assert not ended
    call.finish("end")
    if not early:
        call.when_ended(lambda: ended.append(True))
    assert ended == [True]
