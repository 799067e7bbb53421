"""A turn at a Processor, as an output pulls it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from millstream.v1 import generation_pb2, processor_pb2
from millstream_server.door.names import Names
from millstream_server.door.processors import RemoteStream
from millstream_server.door.turns import DoorParts, RemoteTurn
from millstream_server.generation.output import FinishReason
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.choice import Delta
from millstream_server.processor.conversation import Options
from millstream_server.processor.output import Pacer, PulledOutput
from millstream_server.processor.pulled import PulledTurn
from millstream_server.runtime.errors import ServingError, UnavailableError
from millstream_testing.waiting import until

Message = processor_pb2.ChatOnceResponse
LENGTH = generation_pb2.FINISH_REASON_LENGTH


class Stream:
    """Messages that a test puts in; an exception among them is raised; None is the end."""

    def __init__(self, *first: Any) -> None:
        self.coming: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = 0
        for message in first:
            self.coming.put_nowait(message)

    async def read(self) -> Any:
        message = await self.coming.get()
        if isinstance(message, Exception):
            raise message
        return message

    def close(self) -> None:
        self.closed += 1


class Output(PulledOutput[PulledTurn]):
    """Keeps the deltas, and the usage at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas: list[Delta] = []
        self.tokens = -1

    def _of_text(self, text: str, tokens: int) -> Any:
        self.deltas.append(Delta(0, text, range(tokens)))

    def _of(self, deltas: Sequence[Delta], turn: PulledTurn, *, complete: bool) -> tuple[Any]:
        self.deltas += deltas
        if complete:
            self._end(turn)
            self.tokens = turn.usage().completion_tokens
        return (None,)

    @property
    def texts(self) -> list[str]:
        return [delta.text for delta in self.deltas]


class Call:
    """Pulls the output as soon as it is asked."""

    caller_key = "nobody"

    def __init__(self, output: Output) -> None:
        self._output = output
        self.failed: ServingError | None = None

    def ready(self) -> None:
        try:
            self._output.next()
        except ServingError as error:
            self.failed = error

    def fail(self, failure: ServingError) -> None:
        self.failed = failure


def piece(text: str, index: int = 0, **fields: Any) -> processor_pb2.ChoiceDelta:
    return processor_pb2.ChoiceDelta(index=index, text=text, token_count=len(text), **fields)


def said(*choices: processor_pb2.ChoiceDelta, tokens: int = 0, **fields: Any) -> Message:
    message = Message(choices=choices, **fields)
    if tokens:
        message.finished.usage.completion_tokens = tokens
    return message


async def begun(stream: Stream, n: int = 1) -> tuple[RemoteTurn, Output, Call]:
    turn = RemoteTurn(
        cast("RemoteStream", stream), Names(), Options(path="", sampling={"top_p": 0.7}, n=n)
    )
    output = Output()
    call = Call(output)
    await turn.begin(DoorParts(pacer=Pacer(0.0), unread=UnreadOutput()), call, output)
    return turn, output, call


def started(**fields: Any) -> processor_pb2.TurnStarted:
    return processor_pb2.TurnStarted(request_id="mine", model="tiny", prompt_tokens=9, **fields)


async def test_it_is_what_the_first_message_says() -> None:
    first = said(piece("AB"), started=started(reasoning_set=True))
    first.started.sampling.top_p = 0.9
    first.started.sampling.temperature = 0.6
    turn, output, _ = await begun(Stream(first))
    assert (turn.request.request_id, turn.request.model, turn.switched) == ("mine", "tiny", True)
    assert (turn.request.sampling.top_p, turn.request.sampling.temperature) == (0.7, 0.6)
    assert (turn.usage().prompt_tokens, turn.usage().completion_tokens) == (9, 2)
    assert (turn.reading, output.texts) == (None, ["AB"])
    turn.close()


async def test_the_end_comes_with_the_usage() -> None:
    """In whichever messages the Processor has said them."""
    stream = Stream(said(piece("AB"), piece("X", 1), started=started()))
    turn, output, _ = await begun(stream, n=2)
    stream.coming.put_nowait(said(piece("Y", 1, finish_reason=LENGTH)))
    stream.coming.put_nowait(said(piece("C", finish_reason=LENGTH)))
    await until(lambda: stream.coming.empty() and "Y" in output.texts)
    assert not output.over
    stream.coming.put_nowait(said(tokens=5))
    await until(lambda: output.over)
    assert (output.texts, output.tokens) == (["AB", "X", "Y", "C"], 5)
    assert [choice.finish_reason for choice in turn.choices] == [FinishReason.LENGTH] * 2
    assert [choice.text for choice in turn.choices] == ["ABC", "XY"]
    turn.close()
    assert stream.closed


@pytest.mark.parametrize("end", [UnavailableError("gone"), None])
async def test_it_fails_as_the_rpc_does_or_if_that_ends_too_early(
    end: ServingError | None,
) -> None:
    stream = Stream(said(piece("AB"), started=started()))
    turn, output, call = await begun(stream)
    stream.coming.put_nowait(end)
    await until(lambda: call.failed is not None)
    assert isinstance(call.failed, UnavailableError)
    assert output.texts == ["AB"]
    turn.close()
