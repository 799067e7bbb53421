"""Turns and completions that a Processor runs, pulled as our own are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millstream.v1 import processor_pb2
from millstream_server.door import wire
from millstream_server.door.choices import RemoteChoice, SeenTokens
from millstream_server.door.names import Names
from millstream_server.door.processors import Processors, RemoteStream, gone
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.links.channel import rpc_of
from millstream_server.links.unread import UnreadOutput
from millstream_server.processor.conversation import (
    Caller,
    Completion,
    Conversation,
    Options,
    UserTurn,
)
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.open_calls import OpenCalls
from millstream_server.processor.output import OutputCall, Pacer, TurnOutput
from millstream_server.processor.requests import check_options, turn_paths
from millstream_server.processor.telemetry import Usage
from millstream_server.runtime.errors import Failure, InternalError, ServingError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_CHAT = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/ChatOnce")
_COMPLETE = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Complete")
_RENDER = rpc_of(processor_pb2.DESCRIPTOR, "ProcessorService/Render")


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorParts:
    """What the outputs of a process share."""

    pacer: Pacer
    unread: UnreadOutput


class _NotMeasured:
    """In place of a turn's telemetry: the Processor has it."""

    def first_token(self) -> None: ...


class RemoteTurn:
    """A `processor.pulled.PulledTurn` that a Processor runs."""

    telemetry = _NotMeasured()

    def __init__(self, stream: RemoteStream, names: Names, options: Options) -> None:
        self.error: Failure | None = None
        self.options = options
        self.text_model = SeenTokens()
        self.choices = [RemoteChoice(i, self.text_model.found) for i in range(options.n)]
        self.switched = False
        self.reading: bool | None = None
        """Whether the answers are read; None: they are text."""
        self.request: GenerationRequest
        self.parts: DoorParts
        self._stream = stream
        self._names = names
        self._started = processor_pb2.TurnStarted()
        self._usage: Usage | None = None
        self._last: list[processor_pb2.ChoiceDelta] = []
        """Of the choices that ended last: given out with the usage."""
        self._output: TurnOutput[RemoteTurn]
        self._reading: asyncio.Task[None] | None = None

    async def begin(
        self, parts: DoorParts, call: OutputCall, output: TurnOutput[RemoteTurn]
    ) -> None:
        """Take the first message, and go on in a task.

        Raises:
            ServingError: it failed.
        """
        self.parts, self._output = parts, output
        message = await self._stream.read()
        self._describe(message.started)
        output.begin(self, call)
        try:
            self._take(message)
        except BaseException:  # it has more choices than were asked for
            output.close()
            raise
        self._reading = asyncio.ensure_future(self._read())

    def _describe(self, started: processor_pb2.TurnStarted) -> None:
        self._started = started
        self.switched = started.reasoning_set
        self.reading = True if started.output == processor_pb2.CHAT_OUTPUT_EVENTS else None
        self.request = GenerationRequest(
            request_id=started.request_id,
            model=started.model,
            prompt=Prompt(()),
            sampling=wire.sampling_of(started.sampling, self.options.sampling),
            logprobs=self.options.logprobs,
        )

    async def _read(self) -> None:
        try:
            while (message := await self._stream.read()) is not None:
                self._take(message)
        except ServingError as error:
            self.fail(self._names.renamed(error))
        except Exception as error:  # noqa: BLE001 - else the client would wait for ever
            internal = InternalError.with_id()
            log.error("an answer can't be read", error_id=internal.error_id, error=error)
            self.fail(internal)
        else:
            if self._usage is None:
                self.fail(gone())

    def _take(self, message: Any) -> None:
        if message.HasField("finished"):
            self._usage = wire.usage_of(message.finished.usage)
        for delta in (*self._last, *message.choices):
            self.choices[delta.index].add(delta)
        self._last = []
        if self._usage is None and all(choice.result for choice in self.choices):
            self._last = [choice.unsent.pop() for choice in self.choices if choice.unsent]
            for delta in self._last:
                self.choices[delta.index].tokens -= delta.token_count
                self.choices[delta.index].result = None
        output = self._output
        if not output.scheduled:
            output.schedule()
        if output.gathers:
            output.count(message.ByteSize())

    @property
    def complete(self) -> bool:
        return None not in [choice.finish_reason for choice in self.choices]

    def usage(self) -> Usage:
        """Return the token counts: the Processor's at the end."""
        if self._usage is not None:
            return self._usage
        started, tokens = self._started, sum([choice.tokens for choice in self.choices])
        return Usage(started.prompt_tokens, tokens, 0, started.media_tokens)

    def fail(self, error: Failure) -> None:
        if self.error is None and not self.complete:
            self.error = error
            self._output.send_now()

    def cancel(self) -> None:
        self._stream.close()

    def close(self) -> None:
        """Stop it, in any state."""
        if self._reading is not None:
            self._reading.cancel()
        self._stream.close()
        self._output.close()


@dataclass(frozen=True, slots=True)
class _Start:
    """What a turn is started with, besides its message."""

    names: Names
    options: Options
    caller: Caller


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteRendered:
    """A `RenderedChat`."""

    request: GenerationRequest
    options: Options
    text: str
    stop_token_ids: list[int]


class RemoteChats:
    """`Chats` that Processors run; one per process."""

    def __init__(
        self, processors: Processors, calls: OpenCalls, parts: DoorParts, budget: MediaBudget
    ) -> None:
        self._processors = processors
        self._calls = calls
        self._parts = parts
        self._budget = budget

    def conversation(self) -> Conversation:
        return Conversation(lambda: Uploads(self._budget, 0), self._calls.work)

    async def answer(
        self,
        conversation: Conversation,
        said: UserTurn,
        caller: Caller,
        call: OutputCall,
        output: TurnOutput[RemoteTurn],
    ) -> RemoteTurn:
        names = Names.of_chat(conversation, said.field)
        return await self._start(
            _CHAT,
            lambda: processor_pb2.ChatOnceRequest(start=wire.start_of(conversation)),
            _Start(names, conversation.options, caller),
            call,
            output,
        )

    async def complete(
        self,
        completion: Completion,
        caller: Caller,
        call: OutputCall,
        output: TurnOutput[RemoteTurn],
    ) -> RemoteTurn:
        start = _Start(Names(), completion.options, caller)
        return await self._start(
            _COMPLETE, lambda: wire.completion_of(completion), start, call, output
        )

    async def _start(
        self,
        rpc: Any,
        make: Callable[[], Any],
        start: _Start,
        call: OutputCall,
        output: TurnOutput[RemoteTurn],
    ) -> RemoteTurn:
        caller = start.caller
        _check(start.options)
        with start.names.in_errors():
            stream = await self._processors.stream(
                rpc, wire.sendable(make), deadline_s=caller.deadline_s, trace=caller.trace
            )
            turn = RemoteTurn(stream, start.names, start.options)
            try:
                await turn.begin(self._parts, call, output)
            except BaseException:
                stream.close()
                raise
        return turn

    async def render(
        self, conversation: Conversation, said: UserTurn, caller: Caller
    ) -> RemoteRendered:
        _check(conversation.options)
        with Names.of_chat(conversation, said.field).in_errors():
            start = wire.sendable(lambda: wire.start_of(conversation))
            response = await self._processors.call(
                _RENDER,
                processor_pb2.RenderRequest(start=start),
                deadline_s=caller.deadline_s,
                trace=caller.trace,
            )
        options = conversation.options
        return RemoteRendered(
            request=GenerationRequest(
                request_id=conversation.request_id,
                model=response.model,
                prompt=Prompt(response.token_ids[:], wire.media_of(response)),
                sampling=wire.sampling_of(response.sampling, _without_grammar(options)),
                cache_salt=options.cache_salt,
            ),
            options=options,
            text=response.rendered_prompt,
            stop_token_ids=list(response.stop_token_ids),
        )

    def end(self, turn: RemoteTurn) -> None:
        turn.close()


def _check(options: Options) -> None:
    """Refuse what no message could say; the Processor checks all the rest, and these again.

    Raises:
        InvalidRequestError: an option is wrong.
    """
    check_options("", options, turn_paths("", ""))


def _without_grammar(options: Options) -> dict[str, Any]:
    """Return what was asked of the sampling; the grammar is the Processor's, for tools."""
    return {name: value for name, value in options.sampling.items() if name != "constraint"}
