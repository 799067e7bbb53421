"""Talking to a Processor: requests in a line, answers put together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.v1 import (
    chat_pb2,
    generation_pb2,
    processor_pb2,
    sampling_pb2,
    usage_pb2,
)
from millstream_client import writing
from millstream_testing.waiting import EOF, until


def message(
    text: str, role: chat_pb2.ChatRole.ValueType = chat_pb2.CHAT_ROLE_USER, **fields: Any
) -> chat_pb2.ChatMessage:
    return chat_pb2.ChatMessage(role=role, content=[chat_pb2.ContentPart(text=text)], **fields)


def options(max_new_tokens: int | None = None, **fields: Any) -> processor_pb2.GenerationOptions:
    """Make options; what isn't theirs is sampling's."""
    own = set(processor_pb2.GenerationOptions.DESCRIPTOR.fields_by_name)
    knobs = {name: value for name, value in fields.items() if name not in own}
    return processor_pb2.GenerationOptions(
        sampling=sampling_pb2.SamplingParams(max_new_tokens=max_new_tokens, **knobs),
        **{name: value for name, value in fields.items() if name in own},
    )


def start(*texts: str, opts: processor_pb2.GenerationOptions | None = None, **fields: Any) -> Any:
    """Make a ChatRequest that starts a conversation with user messages."""
    fields.setdefault("messages", [message(text) for text in texts])
    return processor_pb2.ChatRequest(start=processor_pb2.ChatStart(options=opts, **fields))


def user_turn(text: str, opts: processor_pb2.GenerationOptions | None = None) -> Any:
    return processor_pb2.ChatRequest(
        user_turn=processor_pb2.UserTurn(content=[chat_pb2.ContentPart(text=text)], options=opts)
    )


def tool_results(*messages: chat_pb2.ChatMessage) -> Any:
    return processor_pb2.ChatRequest(tool_results=processor_pb2.ToolResults(messages=messages))


CANCEL = processor_pb2.ChatRequest(cancel=processor_pb2.CancelTurn())


@dataclass
class Choice:
    """What one choice came to."""

    text: str = ""
    token_count: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[processor_pb2.TokenLogprob] = field(default_factory=list)
    finish_reason: generation_pb2.FinishReason.ValueType = generation_pb2.FINISH_REASON_UNSPECIFIED
    matched_stop: generation_pb2.MatchedStop | None = None
    events: list[processor_pb2.OutputEvent] = field(default_factory=list)
    tool_calls: list[chat_pb2.ToolCall] = field(default_factory=list)

    def add(self, delta: processor_pb2.ChoiceDelta) -> None:
        assert not self.finish_reason, "a delta after the last"
        self.text += delta.text
        self.token_count += delta.token_count
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.events += delta.events
        self.tool_calls += delta.tool_calls
        self.finish_reason = delta.finish_reason
        if delta.HasField("matched_stop"):
            self.matched_stop = delta.matched_stop


@dataclass
class Answer:
    """One turn, or one completion, put together from its messages."""

    turn: int = 0
    started: processor_pb2.TurnStarted | None = None
    choices: dict[int, Choice] = field(default_factory=dict)
    prompt_logprobs: list[processor_pb2.TokenLogprob] = field(default_factory=list)
    finished: processor_pb2.TurnFinished | None = None
    messages: int = 0
    draining: bool = False

    def add(self, response: processor_pb2.ChatResponse | processor_pb2.CompleteResponse) -> None:
        """Take in a message; checks what each must satisfy."""
        assert self.finished is None, "a message after the last"
        assert response.HasField("started") == (not self.messages)
        self.messages += 1
        if response.HasField("started"):
            self.started = response.started
        indices = [delta.index for delta in response.choices]
        assert len(indices) == len(set(indices)), "two entries for one choice"
        for delta in response.choices:
            self.choices.setdefault(delta.index, Choice()).add(delta)
        self.prompt_logprobs.extend(response.prompt_logprobs)
        if isinstance(response, processor_pb2.ChatResponse):
            self.draining |= response.HasField("draining")
        if response.HasField("finished"):
            self.finished = response.finished
            assert all(choice.finish_reason for choice in self.choices.values())

    @property
    def text(self) -> str:
        """Choice 0's text."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> generation_pb2.FinishReason.ValueType:
        return self.choices[0].finish_reason

    @property
    def usage(self) -> usage_pb2.GenerationUsage:
        assert self.finished is not None
        return self.finished.usage


class Conversation:
    """One open Chat call."""

    def __init__(self, stub: Any, **call: Any) -> None:
        self.call: Any = stub.Chat(**call)
        self.answers: list[Answer] = []
        self.draining = False
        """A notice came between two turns."""

    async def say(self, *requests: processor_pb2.ChatRequest) -> None:
        """Send messages; if the server ends the call meanwhile, reading tells why."""
        for request in requests:
            await writing.write(self.call, request)

    async def read(self) -> bool:
        """Take in one message; False at the end of the stream."""
        async with asyncio.timeout(20):
            response = await self.call.read()
        if response is EOF:
            return False
        if response == processor_pb2.ChatResponse(
            turn=len(self.answers), draining=processor_pb2.ServerDraining()
        ):
            self.draining = True
            return True
        if not self.answers or response.turn != self.answers[-1].turn:
            assert response.turn == len(self.answers) + 1
            assert not self.answers or self.answers[-1].finished is not None
            self.answers.append(Answer(turn=response.turn))
        self.answers[-1].add(response)
        return True

    async def answer(self, turn: int = 1) -> Answer:
        """Read until a turn is over."""
        while len(self.answers) < turn or self.answers[turn - 1].finished is None:
            assert await self.read(), "the stream ended first"
        return self.answers[turn - 1]

    async def end(self) -> list[Answer]:
        """Half-close and read to the end."""
        await writing.half_close(self.call)
        while await self.read():
            pass
        return self.answers


async def chat(
    stub: Any,
    *texts: str,
    opts: processor_pb2.GenerationOptions | None = None,
    **fields: Any,
) -> Answer:
    """One one-shot chat."""
    conversation = Conversation(stub)
    await conversation.say(start(*texts, opts=opts, **fields))
    (answer,) = await conversation.end()
    return answer


async def gather(responses: AsyncIterable[processor_pb2.CompleteResponse]) -> Answer:
    """Put a completion together."""
    answer = Answer()
    async for response in responses:
        answer.add(response)
    assert answer.finished is not None
    return answer


def completion(
    prompt: str | Sequence[int], opts: processor_pb2.GenerationOptions | None = None, **fields: Any
) -> processor_pb2.CompleteRequest:
    """Make a CompleteRequest from text or ids."""
    if isinstance(prompt, str):
        return processor_pb2.CompleteRequest(text=prompt, options=opts, **fields)
    ids = processor_pb2.TokenIds(ids=prompt)
    return processor_pb2.CompleteRequest(token_ids=ids, options=opts, **fields)


async def until_connected(stub: Any, count: int, within_s: float = 30.0) -> None:
    """Wait until a Processor with one model has so many workers."""

    async def connected() -> bool:
        (listed,) = (await stub.ListModels(processor_pb2.ListModelsRequest())).models
        return bool(sum(workers.connected for workers in listed.workers) == count)

    await until(connected, within_s)
