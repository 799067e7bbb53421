"""ProcessorService: converts requests, calls the core, converts responses."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from functools import partial

from millstream.v1 import (
    diffusion_pb2_grpc,
    embedding_pb2_grpc,
    processor_pb2,
    processor_pb2_grpc,
)
from millstream_server.formats.events import Event
from millstream_server.processor import convert
from millstream_server.processor.conversation import Caller, Conversation, DrainNotice, UserTurn
from millstream_server.processor.convert import model_to_proto
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.parse import ParsedAnswer
from millstream_server.processor.reading_wire import (
    parsed_to_proto,
    reading_from_proto,
    rendered_to_proto,
)
from millstream_server.processor.responses import (
    Messages,
    add_events,
    add_token_bytes,
    add_token_ids,
    check_size,
)
from millstream_server.processor.texts import MAX_DETOKENIZED_IDS
from millstream_server.runtime.errors import (
    InternalError,
    InvalidRequestError,
    ServingError,
    StatusError,
    UnavailableError,
)
from millstream_server.runtime.rpc.call import Call, after_first_message
from millstream_server.runtime.rpc.served_call import CallOverError
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.work.pool import WorkPool

log = get_log(__name__)

_DRAINING = processor_pb2.ServerDraining()


class ProcessorServicer(processor_pb2_grpc.ProcessorServiceServicer):
    """Serves ProcessorService."""

    def __init__(self, core: ProcessorCore) -> None:
        self._core = core
        self._pool = core.prompts.threads

    @after_first_message
    async def Chat(self, requests: AsyncIterator[processor_pb2.ChatRequest], call: Call) -> None:
        core = self._core
        conversation = core.conversation()
        reading = None
        try:
            await _begin(requests, conversation, self._pool)
            with core.front.call(conversation.drain):
                rpc_caller, events = Caller.of(call), conversation.answers.events is True
                if call.all_read:  # the client closed its side with its first message, as most do
                    conversation.close_input()
                else:
                    # It runs when this task first waits: by then a short turn is at a worker.
                    reading = asyncio.ensure_future(_read(requests, conversation, self._pool))
                while (said := await conversation.next_turn()) is not None:
                    number = conversation.number
                    if isinstance(said, DrainNotice):
                        await call.write(
                            processor_pb2.ChatResponse(turn=number, draining=_DRAINING)
                        )
                        continue
                    messages = Messages(
                        processor_pb2.ChatResponse, number, conversation.take_notice, events=events
                    )
                    turn = await core.answer(conversation, said, rpc_caller, call, messages)
                    await core.send(turn, messages, call)
                    conversation.ended(turn.choices[0].message, turn.workers)
        finally:
            if reading is not None:
                reading.cancel()
            conversation.close()

    async def ChatOnce(self, request: processor_pb2.ChatOnceRequest, call: Call) -> None:
        core = self._core
        with core.only_turn() as conversation:
            said = await _only_turn(request, conversation, self._pool)
            events = conversation.answers.events is True
            messages = Messages(processor_pb2.ChatOnceResponse, events=events)
            turn = await core.answer(conversation, said, Caller.of(call), call, messages)
            await core.send(turn, messages, call)

    async def Complete(self, request: processor_pb2.CompleteRequest, call: Call) -> None:
        core = self._core
        with core.front.call():
            completion = convert.completion_from_proto(request)
            messages = Messages(processor_pb2.CompleteResponse)
            turn = await core.complete(completion, Caller.of(call), call, messages)
            await core.send(turn, messages, call)

    async def Tokenize(
        self, request: processor_pb2.TokenizeRequest, call: Call
    ) -> processor_pb2.TokenizeResponse:
        texts, kind = self._core.texts, request.WhichOneof("input")
        if kind == "conversation":
            tokens = await texts.of_chat(await convert.untokenized_from_proto(request, self._pool))
        elif kind == "text":
            special = not request.no_special_tokens
            tokens = await texts.of_text(request.model, request.text, special_tokens=special)
        else:
            raise InvalidRequestError.of("input", "set one of text, conversation")
        response = processor_pb2.TokenizeResponse(
            rendered_prompt=tokens.prompt, context_length=tokens.context_length
        )
        if request.return_token_bytes:
            await add_token_bytes(response.token_bytes, tokens)
        await add_token_ids(response.token_ids, tokens.ids)
        check_size(response, kind)
        return response

    async def Detokenize(
        self, request: processor_pb2.DetokenizeRequest, call: Call
    ) -> processor_pb2.DetokenizeResponse:
        ids = request.token_ids
        if len(ids) > MAX_DETOKENIZED_IDS:
            raise InvalidRequestError.of("token_ids", f"at most {MAX_DETOKENIZED_IDS}")
        answer = await self._core.texts.detokenize(
            request.model, ids, special_tokens=request.include_special_tokens
        )
        response = processor_pb2.DetokenizeResponse(text=answer)
        check_size(response, "token_ids")
        return response

    async def Render(
        self, request: processor_pb2.RenderRequest, call: Call
    ) -> processor_pb2.RenderResponse:
        core = self._core
        with core.only_turn() as conversation:
            said = await _only_turn(request, conversation, self._pool)
            prepared = await core.render(conversation, said, Caller.of(call))
        response = rendered_to_proto(prepared, conversation)
        await add_token_ids(response.token_ids, array("I", prepared.request.token_ids))
        check_size(response, "start.messages")
        return response

    @after_first_message
    async def Parse(self, requests: AsyncIterator[processor_pb2.ParseRequest], call: Call) -> None:
        core, answer = self._core, None
        with core.front.call():
            async for request in requests:
                if answer is None:
                    answer = await self._begin_answer(request)
                elif request.HasField("reading"):
                    raise InvalidRequestError.of("reading", "only the first message has it")
                kind = request.WhichOneof("piece")
                if kind == "token_ids":
                    events = await answer.add_ids(request.token_ids.ids, "token_ids.ids")
                elif kind == "text":
                    events = await answer.add_text(request.text, "text")
                else:
                    continue
                if events:
                    convert_events = partial(_events_to_proto, events, kind)
                    await call.write(await answer.converted(convert_events, len(events)))
            if answer is None:
                raise InvalidRequestError.of("reading", "the first message must have it")
            convert_end = partial(_end_to_proto, answer, await answer.finish())
            await call.write(await answer.converted(convert_end))

    async def _begin_answer(self, request: processor_pb2.ParseRequest) -> ParsedAnswer:
        core, reading = self._core, request.reading
        if not request.HasField("reading"):
            raise InvalidRequestError.of("reading", "the first message must have it")
        name, text = core.models.text(reading.model, "reading.model")
        how = core.models.answer_format(name, text, reading.format)
        read = await reading_from_proto(reading, how, self._pool)
        return ParsedAnswer(text, read, self._pool)

    async def ListModels(
        self, request: processor_pb2.ListModelsRequest, call: Call
    ) -> processor_pb2.ListModelsResponse:
        models = [model_to_proto(model) for model in self._core.models.status()]
        return processor_pb2.ListModelsResponse(models=models)


def add_servicers(
    methods: ServicerTable,
    processor: processor_pb2_grpc.ProcessorServiceServicer,
    diffusion: diffusion_pb2_grpc.DiffusionServiceServicer,
    embedding: embedding_pb2_grpc.EmbeddingServiceServicer,
) -> None:
    """Add what a Processor serves to a server's methods."""
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(processor, methods)
    diffusion_pb2_grpc.add_DiffusionServiceServicer_to_server(diffusion, methods)
    embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(embedding, methods)


def _events_to_proto(events: Sequence[Event], field: str) -> processor_pb2.ParseResponse:
    response = processor_pb2.ParseResponse()
    add_events(response, events)
    check_size(response, field)
    return response


def _end_to_proto(answer: ParsedAnswer, events: Sequence[Event]) -> processor_pb2.ParseResponse:
    response = parsed_to_proto(answer, events)
    check_size(response, "reading.tools")
    return response


async def _only_turn(
    request: processor_pb2.ChatOnceRequest | processor_pb2.RenderRequest,
    conversation: Conversation,
    pool: WorkPool,
) -> UserTurn:
    """Begin a conversation of one turn; return it.

    Raises:
        InvalidRequestError: it can't be begun as it was sent.
        UnavailableError: the server shuts down.
    """
    if not request.HasField("start"):
        raise InvalidRequestError.of("start", "must be set")
    await convert.begin(conversation, request.start, pool)
    conversation.close_input()
    said = await conversation.next_turn()
    if not isinstance(said, UserTurn):
        raise UnavailableError("this server is shutting down; retry on another one")
    return said


async def _begin(
    requests: AsyncIterator[processor_pb2.ChatRequest], conversation: Conversation, pool: WorkPool
) -> None:
    """Read the start of a conversation, which comes first but for media chunks."""
    while (request := await _next(requests, conversation)) is not None:
        kind = request.WhichOneof("message")
        if kind == "start":
            await convert.begin(conversation, request.start, pool)
            return
        if kind != "media_chunk":
            break
        convert.take_chunk(conversation, request.media_chunk)
    raise InvalidRequestError.of("start", "the first message must be `start`")


async def _read(
    requests: AsyncIterator[processor_pb2.ChatRequest], conversation: Conversation, pool: WorkPool
) -> None:
    """Pass the client's messages to the conversation until the client closes its side."""
    try:
        while (request := await _next(requests, conversation)) is not None:
            await convert.take_request(conversation, request, pool)
    except (ServingError, StatusError) as error:
        conversation.fail(error)
    except CallOverError:
        pass  # nobody is left to be told
    except Exception as error:  # noqa: BLE001 - else the chat would end well, without the turn
        internal = InternalError.with_id()
        log.error("a message can't be read", error_id=internal.error_id, error=error)
        conversation.fail(internal)
    finally:
        conversation.close_input()


async def _next(
    requests: AsyncIterator[processor_pb2.ChatRequest], conversation: Conversation
) -> processor_pb2.ChatRequest | None:
    """Return the client's next message, None at the end.

    Raises:
        UnavailableError: a file is on its way, and its next chunk doesn't come.
    """
    uploads = conversation.uploading
    if uploads is None or (left_s := uploads.left_s) is None:
        return await anext(requests, None)
    try:
        async with asyncio.timeout(left_s):
            return await anext(requests, None)
    except TimeoutError as error:
        raise uploads.too_slow() from error
