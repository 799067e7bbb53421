"""The loop of an agent: the model calls functions and gets their results, until it answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Self

from millstream.v1 import chat_pb2
from millstream.v1.generation_pb2 import FINISH_REASON_TOOL_CALLS
from millstream_client.errors import RequestCancelledError, ToolRoundsError
from millstream_client.events import Event, ToolCall
from millstream_client.history import Turn
from millstream_client.request import is_task_cancelled
from millstream_client.tool_calls import ToolLimits, ToolResult, run_calls

if TYPE_CHECKING:
    from millstream_client.answers import Answer
    from millstream_client.conversation import Conversation
    from millstream_client.streams import AnswerStream

RunEvent = Event | ToolResult


class ToolRun(AsyncIterator[RunEvent]):
    """Iterate it for the events of all answers and the results between them, or await `answer`.

    It ends with an answer without calls, with one that was cut off, or with a call of a tool that
    is no function: that one is the caller's. Plain functions run in threads of their own.
    """

    def __init__(
        self,
        conversation: Conversation,
        first: AnswerStream,
        limits: ToolLimits,
        timeout_s: float | None,
        *,
        owned: bool,
    ) -> None:
        """Prepare. ``timeout_s`` is for each answer after ``first``.

        ``owned``: the conversation is this run's, and closed at its end.

        Raises:
            TypeError: none of the tools is a function, or answers have several choices.
        """
        history = conversation.history
        if not history.functions:
            raise TypeError("run_tools needs Python functions: give tools=[function, …]")
        if history.choices > 1:
            raise TypeError("run_tools needs answers of one choice: leave n= out")
        self.answers: list[Answer] = []
        """The whole answers so far, those with calls among them."""
        self._conversation = conversation
        self._functions = history.functions
        self._others = {tool.name for tool in history.tools} - history.functions.keys()
        self._stream = first
        self._limits = limits
        self._timeout_s = timeout_s
        self._owned = owned
        self._calls: asyncio.Future[list[ToolResult]] | None = None
        self._cancelled = False
        self._events = self._run()

    @property
    def request_id(self) -> str:
        """The request's id in logs and traces."""
        return self._stream.request_id

    @property
    def messages(self) -> tuple[chat_pb2.ChatMessage, ...]:
        """The conversation so far: questions, answers, calls and their results."""
        return self._conversation.messages

    async def __anext__(self) -> RunEvent:
        """Wait for the next event.

        Raises:
            MillstreamError: a request failed, or (`ToolRoundsError`) the model goes on calling.
        """
        return await anext(self._events)

    async def read(self) -> RunEvent | None:
        """Wait for the next event; return None at the end.

        Raises:
            MillstreamError: as iterating.
        """
        return await anext(self._events, None)

    async def answer(self) -> Answer:
        """Run to the end; return the last answer.

        Raises:
            MillstreamError: as iterating.
        """
        while await self.read() is not None:
            pass
        return self.answers[-1]

    @property
    def calling(self) -> bool:
        """Whether functions are running now."""
        return self._calls is not None and not self._calls.done()

    def cancel(self) -> None:
        """End the run while another task reads; the reader gets a RequestCancelledError."""
        self._cancelled = True
        self._stream.cancel()
        if self._calls is not None:
            self._calls.cancel()

    async def aclose(self) -> None:
        """End the run; no task may be reading."""
        await self._events.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _run(self) -> AsyncGenerator[RunEvent, None]:
        try:
            while True:
                async for event in self._stream.events():
                    yield event
                answer = self._stream.result
                self.answers.append(answer)
                calls = self._to_run(answer)
                if not calls:
                    return
                for result in await self._results(calls):
                    yield result
        finally:
            await self._stream.aclose()
            if self._owned:
                await self._conversation.close()

    def _to_run(self, answer: Answer) -> list[ToolCall]:
        """Return the calls to run; none: the run ends.

        Raises:
            ToolRoundsError: there were enough.
        """
        calls = [call for call in answer.tool_calls if not call.incomplete]
        asked = answer.finish_reason == FINISH_REASON_TOOL_CALLS
        if not asked or any(call.name in self._others for call in calls):
            return []
        if len(self.answers) > self._limits.rounds:
            error = ToolRoundsError(
                f"the model still calls tools after {self._limits.rounds} rounds of results; "
                "a larger ToolLimits.rounds allows more"
            )
            error.request_id, error.partial = self.request_id, answer
            raise error
        return calls

    async def _results(self, calls: list[ToolCall]) -> list[ToolResult]:
        """Run calls and start the turn with their results."""
        self._calls = asyncio.ensure_future(run_calls(calls, self._functions, self._limits))
        try:
            results = await self._calls
        except asyncio.CancelledError as error:
            if is_task_cancelled(error) or not self._cancelled:
                raise
            raise RequestCancelledError("cancelled by the caller") from None
        finally:
            self._calls.cancel()
        if self._cancelled:
            raise RequestCancelledError("cancelled by the caller")
        turn = Turn([result.to_message() for result in results])
        answer_type = self._stream.result.answer_type
        self._stream = self._conversation.stream(turn, self._timeout_s, answer_type)
        return results
