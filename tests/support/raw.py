"""Small clients of the contract, for tests: raw worker streams, chats, load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from millstream.v1 import (
    chat_pb2,
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    processor_pb2,
    processor_pb2_grpc,
    sampling_pb2,
    worker_pb2,
    worker_pb2_grpc,
)


def greedy(max_new_tokens: int) -> sampling_pb2.SamplingParams:
    return sampling_pb2.SamplingParams(
        temperature=0, max_new_tokens=max_new_tokens, ignore_eos=True
    )


def user(text: str) -> chat_pb2.Message:
    return chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[chat_pb2.ContentPart(text=text)])


def start(
    slot: int,
    token_ids: Sequence[int],
    max_new_tokens: int = 8,
    **fields: Any,
) -> generation_pb2.StartGeneration:
    return generation_pb2.StartGeneration(
        slot=slot, token_ids=token_ids, sampling=greedy(max_new_tokens), **fields
    )


class RawStream:
    """One worker stream, read frame by frame; what came is kept by slot."""

    def __init__(self, channel: grpc.aio.Channel, *, prefill: bool = False) -> None:
        if prefill:
            self._call: Any = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill()
            self._request: Any = prefill_pb2.PrefillRequest
        else:
            self._call = decode_pb2_grpc.DecodeServiceStub(channel).Decode()
            self._request = decode_pb2.DecodeRequest
        self.tokens: dict[int, list[int]] = {}
        self.finishes: dict[int, generation_pb2.SlotFinish] = {}
        self.errors: dict[int, Any] = {}
        self.frames: list[generation_pb2.StepFrame] = []

    async def start(self, message: generation_pb2.StartGeneration) -> None:
        await self._call.write(self._request(start=message))

    async def cancel(self, slot: int) -> None:
        await self._call.write(self._request(cancel=generation_pb2.CancelGeneration(slot=slot)))

    def cancel_rpc(self) -> None:
        self._call.cancel()

    async def read(self) -> bool:
        """Take one frame; False when the stream has ended."""
        response = await self._call.read()
        if response is grpc.aio.EOF:
            return False
        frame = response.frame
        self.frames.append(frame)
        counts = frame.token_counts or [1] * len(frame.slots)
        at = 0
        for slot, count in zip(frame.slots, counts, strict=True):
            self.tokens.setdefault(slot, []).extend(frame.token_ids[at : at + count])
            at += count
        for finish in frame.finishes:
            assert finish.slot not in self.ended, "two terminal entries for one slot"
            self.finishes[finish.slot] = finish
        for error in frame.errors:
            assert error.slot not in self.ended, "two terminal entries for one slot"
            self.errors[error.slot] = error.error
        return True

    @property
    def ended(self) -> set[int]:
        return {*self.finishes, *self.errors}

    async def until_ended(self, *slots: int) -> None:
        while not self.ended.issuperset(slots):
            assert await self.read(), "the stream ended before its slots"

    async def until_tokens(self, slot: int, count: int) -> None:
        while len(self.tokens.get(slot, ())) < count:
            assert await self.read(), "the stream ended early"

    async def close(self) -> None:
        await self._call.done_writing()
        while await self.read():
            pass


async def complete(
    channel: grpc.aio.Channel,
    token_ids: Sequence[int],
    max_new_tokens: int,
    timeout_s: float | None = None,
) -> tuple[list[int], Any]:
    """Complete greedily through a Processor: token ids and the TurnFinished message."""
    stub = processor_pb2_grpc.ProcessorServiceStub(channel)
    request = processor_pb2.CompleteRequest(
        token_ids=processor_pb2.TokenIds(ids=token_ids),
        options=processor_pb2.GenerationOptions(
            sampling=greedy(max_new_tokens), return_token_ids=True
        ),
    )
    ids: list[int] = []
    finished = None
    async for response in stub.Complete(request, timeout=timeout_s):
        for choice in response.choices:
            ids += choice.token_ids
        if response.HasField("finished"):
            finished = response.finished
    return ids, finished


class LoadWatch:
    """Follows a worker's load reports."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = worker_pb2_grpc.WorkerServiceStub(channel)

    async def until(self, what: str, timeout_s: float) -> worker_pb2.LoadReport:
        """Wait until the load is "idle" (nothing runs, queues or holds blocks) or "busy"."""
        interval = Duration()
        interval.FromMilliseconds(100)
        began = time.monotonic()
        last = None
        call = self._stub.WatchLoad(worker_pb2.WatchLoadRequest(interval=interval))
        try:
            async with asyncio.timeout(timeout_s):
                async for response in call:
                    last = response.load
                    busy = last.running_requests + last.queued_requests + last.used_blocks
                    if bool(busy) == (what == "busy"):
                        return last
        except TimeoutError:
            took = time.monotonic() - began
            message = f"the engine is not {what} after {took:.1f} s: {last}"
            raise AssertionError(message) from None
        finally:
            call.cancel()
        message = "the load stream ended"
        raise AssertionError(message)


def failure(error: grpc.RpcError) -> tuple[str, dict[str, str], dict[str, str]]:
    """Take an RPC's failure apart: reason, its metadata, violations by field path."""
    metadata = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        detail.Unpack(info)
        detail.Unpack(bad)
    fields = {v.field: v.description for v in bad.field_violations}
    return info.reason, dict(info.metadata), fields
