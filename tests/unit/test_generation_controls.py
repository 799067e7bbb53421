"""Starts and cancels gather into messages in order, and none is lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest

from millstream_server.generation.request import Prompt
from millstream_server.links import generation_stream
from millstream_server.links.generation_stream import GenerationStream
from millstream_server.links.slot_stream import Connection
from millstream_server.routing.workers import WorkerView
from millstream_testing.waiting import until
from tests.support.processor.played_channel import PlayedChannel
from tests.support.processor.played_worker import REQUEST, Sink
from tests.support.processor.views import description

BROKEN = replace(REQUEST, prompt=Prompt(cast("Any", ["x"])))


class Played:
    """A stream to a played worker; nothing is sent before `sending`."""

    def __init__(self, *, batched: bool = True) -> None:
        self.channel = PlayedChannel()
        self.view = WorkerView("here")
        worker = replace(description(), batched_controls=batched)
        self.stream = GenerationStream(Connection(self.channel, worker, self.view, lambda: None))

    @property
    def messages(self) -> list[Sequence[Any]]:
        """The controls of each message that the worker got."""
        written = self.channel.streams["DecodeService/Decode"].written
        return [message.controls or [message] for message in written]

    @property
    def asked(self) -> list[list[str]]:
        """What each message asks for, in its order."""
        return [
            [
                f"start {control.start.slot}"
                if control.HasField("start")
                else f"cancel {control.cancel.slot}"
                for control in controls
            ]
            for controls in self.messages
        ]

    @contextlib.asynccontextmanager
    async def sending(self) -> AsyncIterator[None]:
        running = asyncio.ensure_future(self.stream.run())
        try:
            yield
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_worker_of_an_older_version_gets_one_control_per_message() -> None:
    it = Played(batched=False)
    it.stream.start(REQUEST, Sink()).cancel()
    it.stream.start(REQUEST, Sink())
    async with it.sending():
        await until(lambda: it.asked == [["start 0"], ["cancel 0"], ["start 1"]])


async def test_what_has_gathered_leaves_in_one_message_in_order() -> None:
    it = Played()
    it.stream.start(REQUEST, Sink()).cancel()
    last = it.stream.start(REQUEST, Sink())
    async with it.sending():
        await until(lambda: it.asked == [["start 0", "cancel 0", "start 1"]])
        last.cancel()
        await until(lambda: it.asked[1:] == [["cancel 1"]])


async def test_a_batch_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation_stream, "_MAX_BATCH_TOKENS", 5)
    it = Played()
    prompts = [replace(REQUEST, prompt=Prompt(range(tokens))) for tokens in (3, 2, 1, 9, 1)]
    first, *_ = (it.stream.start(prompt, Sink()) for prompt in prompts[:3])
    first.cancel()
    for prompt in prompts[3:]:
        it.stream.start(prompt, Sink())
    async with it.sending():
        await until(
            lambda: (
                it.asked
                == [["start 0", "start 1"], ["start 2", "cancel 0"], ["start 3"], ["start 4"]]
            )
        )


@pytest.mark.parametrize("batched", [True, False])
async def test_what_cannot_be_written_is_left_out(*, batched: bool) -> None:
    it = Played(batched=batched)
    with pytest.raises(TypeError):
        it.stream.start(BROKEN, Sink())
    opened = it.stream.start(REQUEST, Sink())
    with pytest.raises(TypeError):
        it.stream.start(BROKEN, Sink())
    opened.cancel()
    assert (it.view.in_flight, it.view.in_use) == (1, 0)
    async with it.sending():
        await until(lambda: [*itertools.chain(*it.asked)] == ["start 0", "cancel 0"])


@pytest.mark.parametrize("batched", [True, False])
async def test_a_start_carries_the_request(*, batched: bool) -> None:
    it = Played(batched=batched)
    sampling = replace(REQUEST.sampling, top_k=3)
    it.stream.start(replace(REQUEST, prompt=Prompt([7, 8]), sampling=sampling), Sink())
    async with it.sending():
        await until(lambda: bool(it.messages))
    ((control,),) = it.messages
    assert list(control.start.token_ids) == [7, 8]
    assert control.start.sampling.top_k == 3
    assert control.start.sampling.max_new_tokens == 4
