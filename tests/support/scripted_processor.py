"""A Processor that gives the answers of a script, with reasoning and tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from millstream.v1 import chat_pb2, generation_pb2, processor_pb2, processor_pb2_grpc

OutputEvent = processor_pb2.OutputEvent
CALLS = generation_pb2.FINISH_REASON_TOOL_CALLS
STOP = generation_pb2.FINISH_REASON_STOP
LENGTH = generation_pb2.FINISH_REASON_LENGTH


def called(name: str, *pieces: str, index: int = 0, incomplete: bool = False) -> list[OutputEvent]:
    """Return the events of a call; one that is cut has no end."""
    start = processor_pb2.ToolCallStart(index=index, id=f"id{index}", name=name)
    end = [] if incomplete else [OutputEvent(tool_call_end=processor_pb2.ToolCallEnd())]
    arguments = [OutputEvent(tool_call_arguments_json=piece) for piece in pieces]
    return [OutputEvent(tool_call_start=start), *arguments, *end]


def said(text: str) -> list[OutputEvent]:
    return [OutputEvent(text=text)]


_Answer = tuple[Sequence[OutputEvent], "generation_pb2.FinishReason.ValueType"]


class ScriptedProcessor(processor_pb2_grpc.ProcessorServiceServicer):
    """Gives the next answer of a script to each turn, one event a message; the last one stays."""

    def __init__(self, *answers: _Answer) -> None:
        self._answers = list(answers)
        self.asked: list[processor_pb2.ChatRequest] = []

    @property
    def results(self) -> list[list[Any]]:
        """The results of each turn of them, as the model gets them."""
        turns = [turn.tool_results.messages for turn in self.asked if turn.HasField("tool_results")]
        return [[_read(message.content[0].text) for message in turn] for turn in turns]

    async def Chat(
        self, request_iterator: AsyncIterator[processor_pb2.ChatRequest], _context: Any
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        turn = 0
        async for request in request_iterator:
            self.asked.append(request)
            turn += 1
            events, reason = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
            started = processor_pb2.TurnStarted(request_id="r", model="scripted")
            yield processor_pb2.ChatResponse(turn=turn, started=started)
            for event in events:
                yield _delta(turn, events=[event])
            yield _delta(turn, finish_reason=reason, tool_calls=_whole(events))
            yield processor_pb2.ChatResponse(turn=turn, finished=processor_pb2.TurnFinished())


def _whole(events: Sequence[OutputEvent]) -> list[chat_pb2.ToolCall]:
    calls: list[chat_pb2.ToolCall] = []
    for event in events:
        if event.HasField("tool_call_start"):
            start = event.tool_call_start
            calls.append(chat_pb2.ToolCall(id=start.id, name=start.name, incomplete=True))
        elif event.HasField("tool_call_end"):
            calls[-1].incomplete = event.tool_call_end.incomplete
        elif event.HasField("tool_call_arguments_json"):
            calls[-1].arguments_json += event.tool_call_arguments_json
    return calls


def _delta(turn: int, **fields: Any) -> processor_pb2.ChatResponse:
    delta = processor_pb2.ChoiceDelta(token_count=1, **fields)
    return processor_pb2.ChatResponse(turn=turn, choices=[delta])


def _read(text: str) -> Any:
    return json.loads(text) if text.startswith("{") else text


@contextlib.asynccontextmanager
async def serving(*answers: _Answer) -> AsyncIterator[tuple[ScriptedProcessor, str]]:
    processor = ScriptedProcessor(*answers)  # type: ignore[abstract]  # of its RPCs, Chat
    server = grpc.aio.server()
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(processor, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield processor, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)
