"""A worker stream by hand: what goes up, and what comes down sorted by slot."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration

from millstream.v1 import (
    decode_pb2,
    diffusion_pb2,
    errors_pb2,
    generation_pb2,
    kv_transfer_pb2,
    prefill_pb2,
    sampling_pb2,
)
from millstream_server.generation import wire as convert
from millstream_server.generation.request import GenerationRequest
from millstream_server.generation.ticket import Ticket
from millstream_testing.waiting import EOF
from tests.support.processor.generation_messages import start_to_proto


class SlotView:
    """What one slot has received."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[generation_pb2.TokenLogprobs] = []
        self.finish: generation_pb2.SlotFinish | None = None
        self.error: errors_pb2.RequestError | None = None
        self.terminals = 0

    @property
    def reason(self) -> str:
        """The error's reason, without its prefix."""
        assert self.error is not None, self.finish
        name = errors_pb2.ErrorReason.Name(self.error.reason)
        return name.removeprefix("ERROR_REASON_")

    @property
    def fields(self) -> list[str]:
        """The fields that were refused."""
        assert self.error is not None, self.finish
        return [violation.field for violation in self.error.violations]


class Stream:
    """One open Decode or Prefill call. Checks what every frame must satisfy as it reads."""

    def __init__(self, method: Callable[..., Any], request_type: Any) -> None:
        self.call = method()
        self.frames: list[generation_pb2.StepFrame] = []
        self.slots: defaultdict[int, SlotView] = defaultdict(SlotView)
        self._request_type = request_type

    async def start(
        self,
        slot: int,
        token_ids: Sequence[int],
        *,
        sampling: sampling_pb2.SamplingParams | None = None,
        logprobs: sampling_pb2.LogprobOptions | None = None,
        ticket: Ticket | kv_transfer_pb2.KvHandoffTicket | None = None,
        timeout_s: float | None = None,
        model: str = "",
        adapter: str = "",
        cache_salt: str = "",
        **knobs: Any,
    ) -> None:
        """Start a request in a fresh view of the slot; ``knobs`` are sampling's."""
        if isinstance(ticket, Ticket):
            ticket = convert.ticket_to_proto(ticket)
        timeout = None
        if timeout_s is not None:
            timeout = Duration(seconds=math.floor(timeout_s), nanos=int(timeout_s % 1 * 1e9))
        self.slots[slot] = SlotView()
        await self.call.write(
            self._request_type(
                start=generation_pb2.StartGeneration(
                    slot=slot,
                    request_id=f"slot-{slot}",
                    token_ids=token_ids,
                    sampling=sampling or sampling_pb2.SamplingParams(**knobs),
                    logprobs=logprobs,
                    ticket=ticket,
                    timeout=timeout,
                    model=model,
                    adapter=adapter,
                    cache_salt=cache_salt,
                )
            )
        )

    async def start_request(self, slot: int, request: GenerationRequest) -> None:
        """Start ``request`` in a fresh view of the slot."""
        self.slots[slot] = SlotView()
        await self.call.write(self._request_type(start=start_to_proto(slot, request)))

    async def cancel(self, slot: int) -> None:
        """Ask for a slot's end."""
        await self.call.write(self._request_type(cancel=generation_pb2.CancelGeneration(slot=slot)))

    async def read(self) -> bool:
        """Take in one frame; False at the end of the stream."""
        async with asyncio.timeout(20):
            response = await self.call.read()
        if response is EOF:
            return False
        frame = response.frame
        assert frame.sequence == len(self.frames) + 1
        self.frames.append(frame)
        self._sort(frame)
        return True

    async def until(self, condition: Callable[[], bool]) -> None:
        """Read until ``condition`` holds."""
        while not condition():
            assert await self.read(), "the stream ended first"

    async def ended(self, *slots: int) -> list[SlotView]:
        """Read until these slots have ended."""
        await self.until(lambda: all(self.slots[slot].terminals for slot in slots))
        return [self.slots[slot] for slot in slots]

    async def first_token(self, slot: int) -> None:
        """Read until the slot has a token."""
        await self.until(lambda: bool(self.slots[slot].token_ids))

    async def drain(self) -> None:
        """Half-close and read to the end."""
        await self.call.done_writing()
        while await self.read():
            pass

    def _sort(self, frame: generation_pb2.StepFrame) -> None:
        assert frame.slots or frame.finishes or frame.errors or frame.draining, "an empty frame"
        if frame.token_counts:
            assert set(frame.token_counts) != {1}, "counts of one each are left out"
            assert 0 not in frame.token_counts
        counts = frame.token_counts or [1] * len(frame.slots)
        assert sum(counts) == len(frame.token_ids)
        at = 0
        for slot, count in zip(frame.slots, counts, strict=True):
            assert not self.slots[slot].terminals, "tokens after the end"
            self.slots[slot].token_ids += frame.token_ids[at : at + count]
            at += count
        for entry in frame.logprobs:
            self.slots[entry.slot].logprobs.append(entry.tokens)
        for finish in frame.finishes:
            self.slots[finish.slot].finish = finish
            self.slots[finish.slot].terminals += 1
        for failed in frame.errors:
            self.slots[failed.slot].error = failed.error
            self.slots[failed.slot].terminals += 1
        assert all(view.terminals <= 1 for view in self.slots.values()), "two ends"


def decode_stream(stub: Any) -> Stream:
    """Open a Decode call."""
    return Stream(stub.Decode, decode_pb2.DecodeRequest)


def prefill_stream(stub: Any) -> Stream:
    """Open a Prefill call."""
    return Stream(stub.Prefill, prefill_pb2.PrefillRequest)


def text_stream(stub: Any) -> Stream:
    """Open a GenerateText call."""
    return Stream(stub.GenerateText, diffusion_pb2.GenerateTextRequest)
