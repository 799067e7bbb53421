"""gRPC face of the Processor: decode the request, call the core, encode the response."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_server.processor import convert
from millstream_server.processor.conversation import Inbox, Turn
from millstream_server.processor.core import ProcessorCore, ServedModel, placed
from millstream_server.processor.generation import Delta, Generation, GenerationSpec
from millstream_server.processor.text.messages import ChatMessage, ChatRole
from millstream_server.processor.turn_telemetry import (
    CHAT,
    TEXT_COMPLETION,
    Turns,
    TurnTelemetry,
)
from millstream_server.routing.pool import Route
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.places import Place
from millstream_server.runtime.tracing import incoming

MAX_DETOKENIZE_IDS = 1 << 20


class ProcessorServicer(processor_pb2_grpc.ProcessorServiceServicer):
    """Serves ProcessorService."""

    def __init__(self, core: ProcessorCore, turns: Turns | None = None) -> None:
        """Decide with ``core``; ``turns`` tells of what was answered."""
        self._core = core
        self._turns = turns or Turns()

    async def Chat(
        self,
        request_iterator: AsyncIterator[processor_pb2.ChatRequest],
        context: Any,
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        """Hold one conversation."""
        first = await anext(request_iterator, None)
        if first is None or first.WhichOneof("message") != "start":
            raise InvalidRequestError.of("start", "the first message must be `start`")
        inbox = Inbox(lambda: self._core.work.refusing)
        chat = _Chat(self._core, first.start, context, self._turns)

        def waiting(place: Place) -> None:
            inbox.listen(request_iterator)
            inbox.running(place)

        with self._core.call(inbox.drain), contextlib.closing(inbox):
            turn: Turn | None = chat.first_turn()
            while turn is not None:
                generation, responses = await chat.start(turn, waiting)
                # Only now: reading on would hold up the first turn's way to its worker.
                inbox.listen(request_iterator)
                inbox.running(generation)
                async for response in responses:
                    yield response
                inbox.ended()
                turn = await inbox.next_turn()

    async def Complete(
        self, request: processor_pb2.CompleteRequest, context: Any
    ) -> AsyncIterator[processor_pb2.CompleteResponse]:
        """Continue a raw prompt."""
        telemetry = self._turns.open(TEXT_COMPLETION, incoming(context.invocation_metadata()))
        with telemetry, self._core.call():
            served, spec = await self._completion(request, context, telemetry)
            generation, _ = await self._core.start(spec, served.text)
            with contextlib.closing(generation):
                started: processor_pb2.TurnStarted | None = _started(spec)
                async for deltas in generation.deltas():
                    yield processor_pb2.CompleteResponse(
                        started=started,
                        choices=_choices(deltas, spec, served),
                        finished=_finished(generation, served),
                    )
                    started = None

    async def _completion(
        self, request: processor_pb2.CompleteRequest, context: Any, telemetry: TurnTelemetry
    ) -> tuple[ServedModel, GenerationSpec]:
        """Answer the checked request that a raw prompt makes."""
        served = self._core.served(request.model)
        telemetry.serves(served.name, served.engine.engine)
        kind = request.WhichOneof("prompt")
        if kind == "text":
            token_ids = await self._core.off_loop(
                lambda: served.text.encode(request.text, add_special_tokens=True)
            )
        elif kind == "token_ids":
            token_ids = request.token_ids.ids[:]
        else:
            raise InvalidRequestError.of("prompt", "set one of text, token_ids")
        spec = replace(
            _spec(
                request.options,
                request.request_id,
                served,
                token_ids,
                context=context,
                telemetry=telemetry,
            ),
            continuation=True,
        )
        self._core.check(spec, served.engine, "text" if kind == "text" else "token_ids.ids")
        telemetry.asks(spec)
        return served, spec

    async def Tokenize(
        self, request: processor_pb2.TokenizeRequest, context: Any
    ) -> processor_pb2.TokenizeResponse:
        """Turn text or a conversation into token ids."""
        _, text = self._core.text_model(request.model)
        kind = request.WhichOneof("input")
        if kind == "conversation":
            try:
                prompt, ids = await self._core.render_chat(
                    text,
                    convert.messages_from_proto(request.conversation.messages, "messages"),
                    convert.tools_from_proto(request.conversation.tools, "tools"),
                )
            except InvalidRequestError as error:
                raise placed(error, lambda field: f"conversation.{field}") from error
            return processor_pb2.TokenizeResponse(token_ids=ids, rendered_prompt=prompt)
        if kind != "text":
            raise InvalidRequestError.of("input", "set one of text, conversation")
        special = not request.no_special_tokens
        ids = await self._core.off_loop(
            lambda: text.encode(request.text, add_special_tokens=special)
        )
        return processor_pb2.TokenizeResponse(token_ids=ids)

    async def Detokenize(
        self, request: processor_pb2.DetokenizeRequest, context: Any
    ) -> processor_pb2.DetokenizeResponse:
        """Turn token ids into text."""
        _, text = self._core.text_model(request.model)
        ids = request.token_ids[:]
        if len(ids) > MAX_DETOKENIZE_IDS:
            raise InvalidRequestError.of("token_ids", f"at most {MAX_DETOKENIZE_IDS}")
        if ids and max(ids) >= text.vocab_size:
            at = next(i for i, token in enumerate(ids) if token >= text.vocab_size)
            raise InvalidRequestError.of(
                f"token_ids[{at}]", f"must be below the vocabulary's size, {text.vocab_size}"
            )
        skip = not request.include_special_tokens
        answer = await self._core.off_loop(lambda: text.decode(ids, skip_special_tokens=skip))
        return processor_pb2.DetokenizeResponse(text=answer)

    async def ListModels(
        self, request: processor_pb2.ListModelsRequest, context: Any
    ) -> processor_pb2.ListModelsResponse:
        """Tell which models are served."""
        return processor_pb2.ListModelsResponse(
            models=[
                convert.model_to_proto(name, text, ready=ready, engine=engine, workers=workers)
                for name, (text, ready, engine, workers) in self._core.models().items()
            ]
        )


class _Chat:
    """One conversation's state from turn to turn."""

    def __init__(
        self, core: ProcessorCore, start: processor_pb2.ChatStart, context: Any, told: Turns
    ) -> None:
        self._core = core
        self._told = told
        self._trace = incoming(context.invocation_metadata())
        self._start = start
        self._context = context
        self._options = start.options
        self._messages: list[ChatMessage] = []
        self._tools = convert.tools_from_proto(start.tools, "start.tools")
        self._turns = 0
        self._route: Route | None = None

    def first_turn(self) -> Turn:
        messages = convert.messages_from_proto(self._start.messages, "start.messages")
        return Turn(tuple(messages), None, "start")

    async def start(
        self, turn: Turn, on_wait: Callable[[Place], None]
    ) -> tuple[Generation, AsyncIterator[processor_pb2.ChatResponse]]:
        """Start to answer one turn; its messages and, in the end, the answer join the context."""
        context = len(self._messages)
        telemetry = self._told.open(CHAT, self._trace, self._turns + 1)
        with telemetry:
            try:
                served, spec = await self._prepare(turn, telemetry)
            except InvalidRequestError as error:
                raise placed(error, lambda field: turn.place(field, context)) from error
            generation, self._route = await self._core.start(
                spec, served.text, self._route, on_wait
            )
        return generation, self._responses(generation, served, spec)

    async def _responses(
        self, generation: Generation, served: ServedModel, spec: GenerationSpec
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        try:
            started: processor_pb2.TurnStarted | None = _started(spec)
            async for deltas in generation.deltas():
                yield processor_pb2.ChatResponse(
                    turn=self._turns,
                    started=started,
                    choices=_choices(deltas, spec, served),
                    finished=_finished(generation, served),
                )
                started = None
        finally:
            generation.close()
        self._messages.append(ChatMessage(ChatRole.ASSISTANT, generation.first_text()))

    async def _prepare(
        self, turn: Turn, telemetry: TurnTelemetry
    ) -> tuple[ServedModel, GenerationSpec]:
        """Add a turn to the conversation; answer the checked request that it makes."""
        served = self._core.served(self._start.model)
        telemetry.serves(served.name, served.engine.engine)
        self._turns += 1
        self._messages += turn.messages
        self._options = turn.options or self._options
        _, token_ids = await self._core.render_chat(served.text, self._messages, self._tools)
        spec = _spec(
            self._options,
            self._start.request_id,
            served,
            token_ids,
            context=self._context,
            telemetry=telemetry,
        )
        if turn.options is None and self._turns > 1:
            spec = _fitted(spec, served.engine.context_length)
        self._core.check(spec, served.engine, "messages")
        telemetry.asks(spec)
        return served, spec


def _spec(
    options: processor_pb2.GenerationOptions,
    request_id: str,
    served: ServedModel,
    token_ids: list[int],
    *,
    context: Any,
    telemetry: TurnTelemetry,
) -> GenerationSpec:
    spec = convert.spec_from_proto(
        options,
        request_id=request_id,
        model=served.name,
        token_ids=token_ids,
        text=served.text,
        engine=served.engine,
        timeout_s=context.time_remaining(),
        trace=telemetry.trace,
    )
    return replace(spec, telemetry=telemetry)


def _fitted(spec: GenerationSpec, context_length: int) -> GenerationSpec:
    """Bound a later turn's answer by the room that the conversation has left."""
    room = max(1, context_length - len(spec.token_ids))
    if spec.sampling.max_new_tokens <= room:
        return spec
    return replace(spec, sampling=replace(spec.sampling, max_new_tokens=room))


def _started(spec: GenerationSpec) -> processor_pb2.TurnStarted:
    return processor_pb2.TurnStarted(request_id=spec.request_id, model=spec.model)


def _choices(
    deltas: list[Delta], spec: GenerationSpec, served: ServedModel
) -> list[processor_pb2.ChoiceDelta]:
    return [convert.delta_to_proto(delta, spec, served.text) for delta in deltas]


def _finished(generation: Generation, served: ServedModel) -> processor_pb2.TurnFinished | None:
    return convert.finished_to_proto(generation, served.text) if generation.complete else None
