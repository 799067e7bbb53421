"""A Processor without a model: answers that can be worked out by hand, over a real socket.

A question is answered word by word with "You said: " and the question. Some questions do more:

- "slow ..."    waits before each word, until cancelled
- "deaf ..."    waits before each word and doesn't heed a cancel
- "context"     answers with every message it was given, as "role=text|role=text"
- "options"     answers with the sampling options it was given
- "bad"         fails with INVALID_ARGUMENT and two field violations
- "busy"        fails with RESOURCE_EXHAUSTED and a retry delay
- "internal"    fails with INTERNAL and an error id
- "hang up"     ends the stream in the middle of the answer
- "blind"       fails with UNSUPPORTED_FEATURE, as a model that takes no images

An image or a video in a message reads as "<image of 5 bytes>". Uploads are checked as the contract
says; the files that messages had are in `files`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Self

import grpc
from google.protobuf import duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from millstream.v1 import (
    chat_pb2,
    generation_pb2,
    media_pb2,
    processor_pb2,
    processor_pb2_grpc,
    usage_pb2,
    worker_pb2,
)

MODEL = "fake"
_ROLES = (worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE)


class _EndOfStreamError(Exception):
    """The fake hangs up."""


@dataclass
class _Conversation:
    said: list[tuple[str, str]] = field(default_factory=list)
    options: processor_pb2.GenerationOptions = field(
        default_factory=processor_pb2.GenerationOptions
    )
    turn: int = 0
    question: str = ""
    """The last message's text, without its media."""
    uploads: dict[str, _Upload] = field(default_factory=dict)
    files: list[bytes | str] = field(default_factory=list)
    """The bytes, or the URL, of each image and video, in order."""

    def add(self, message: chat_pb2.ChatMessage) -> None:
        role = chat_pb2.ChatRole.Name(message.role).removeprefix("CHAT_ROLE_").lower()
        self.question = "".join(part.text for part in message.content)
        self.said.append((role, "".join(map(self._read, message.content))))

    def _read(self, part: chat_pb2.ContentPart) -> str:
        kind = part.WhichOneof("part")
        if kind not in ("image", "video"):
            return part.text
        media = part.image if kind == "image" else part.video
        if media.url:
            self.files.append(media.url)
            return f"<{kind} at {media.url}>"
        data = self.uploads.pop(media.upload_id).whole() if media.upload_id else media.data
        self.files.append(data)
        return f"<{kind} of {len(data)} bytes>"


@dataclass
class _Upload:
    total: int
    data: bytearray = field(default_factory=bytearray)

    def whole(self) -> bytes:
        assert len(self.data) == self.total, f"{len(self.data)} of {self.total} bytes came"
        return bytes(self.data)


class FakeProcessor(processor_pb2_grpc.ProcessorServiceServicer):
    """Counts the conversations it was asked for, and keeps what it was told."""

    def __init__(self) -> None:
        self.streams = 0
        self.chunks: list[media_pb2.MediaChunk] = []
        """Without their data."""
        self.files: list[list[bytes | str]] = []
        """The files of each stream, in order."""
        self.most_upload_bytes = 1 << 30
        self.reads = asyncio.Event()
        """Cleared: clients' messages aren't read."""
        self.reads.set()
        self.unavailable_turns = 0
        """How many turns fail with UNAVAILABLE from now on."""
        self.cancels = 0
        self.told_to_cancel = asyncio.Event()
        self.starts: list[processor_pb2.ChatStart] = []
        self.completions: list[processor_pb2.CompleteRequest] = []

    async def Chat(
        self, request_iterator: AsyncIterator[processor_pb2.ChatRequest], context: Any
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        self.streams += 1
        requests: asyncio.Queue[processor_pb2.ChatRequest | None] = asyncio.Queue()
        cancelled = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, requests, cancelled))
        conversation = _Conversation()
        self.files.append(conversation.files)
        try:
            while (request := await requests.get()) is not None:
                if request.HasField("media_chunk"):
                    await self._take_chunk(request.media_chunk, conversation, context)
                    continue
                self._take(request, conversation)
                cancelled.clear()
                async for response in self._answer(conversation, cancelled, context):
                    yield response
        except _EndOfStreamError:
            return
        finally:
            reader.cancel()

    async def ChatOnce(
        self, request: processor_pb2.ChatOnceRequest, context: Any
    ) -> AsyncIterator[processor_pb2.ChatOnceResponse]:
        async def only() -> AsyncIterator[processor_pb2.ChatRequest]:
            yield processor_pb2.ChatRequest(start=request.start)

        async for said in self.Chat(only(), context):
            yield processor_pb2.ChatOnceResponse(
                started=said.started if said.HasField("started") else None,
                choices=said.choices,
                finished=said.finished if said.HasField("finished") else None,
            )

    async def _read(
        self,
        incoming: AsyncIterator[processor_pb2.ChatRequest],
        requests: asyncio.Queue[processor_pb2.ChatRequest | None],
        cancelled: asyncio.Event,
    ) -> None:
        async for request in incoming:
            await self.reads.wait()
            if request.WhichOneof("message") == "cancel":
                self.cancels += 1
                self.told_to_cancel.set()
                cancelled.set()
            else:
                requests.put_nowait(request)
        requests.put_nowait(None)

    async def _take_chunk(
        self, chunk: media_pb2.MediaChunk, conversation: _Conversation, context: Any
    ) -> None:
        if chunk.total_bytes > self.most_upload_bytes:
            await _abort(context, _too_large(chunk))
        if chunk.upload_id not in conversation.uploads:
            assert 1 <= len(chunk.upload_id.encode()) <= 128
            assert chunk.total_bytes
            conversation.uploads[chunk.upload_id] = _Upload(chunk.total_bytes)
        assert 0 < len(chunk.data) <= 1 << 20
        conversation.uploads[chunk.upload_id].data += chunk.data
        chunk.ClearField("data")
        self.chunks.append(chunk)

    def _take(self, request: processor_pb2.ChatRequest, conversation: _Conversation) -> None:
        conversation.turn += 1
        content = request.user_turn.content
        messages = [chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)]
        if request.HasField("start"):
            self.starts.append(request.start)
            conversation.options = request.start.options
            messages = list(request.start.messages)
        for message in messages:
            conversation.add(message)

    async def _answer(
        self, conversation: _Conversation, cancelled: asyncio.Event, context: Any
    ) -> AsyncIterator[processor_pb2.ChatResponse]:
        question = conversation.question
        if self.unavailable_turns:
            self.unavailable_turns -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not now")
        await _fail_if_asked(question, context)
        words = _words(question, conversation)
        turn = conversation.turn
        yield processor_pb2.ChatResponse(
            turn=turn, started=processor_pb2.TurnStarted(request_id=f"turn-{turn}", model=MODEL)
        )
        sent: list[str] = []
        for word in words:
            if question.startswith("deaf"):
                await asyncio.sleep(0.1)
                cancelled.clear()
            if question.startswith("slow"):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(cancelled.wait(), 0.2)
            if cancelled.is_set():
                break
            if question == "hang up" and sent:
                raise _EndOfStreamError
            sent.append(word)
            delta = processor_pb2.ChoiceDelta(text=word, token_count=1)
            yield processor_pb2.ChatResponse(turn=turn, choices=[delta])
        conversation.said.append(("assistant", "".join(sent)))
        reason = generation_pb2.FINISH_REASON_STOP
        if cancelled.is_set():
            reason = generation_pb2.FINISH_REASON_CANCELLED
        yield processor_pb2.ChatResponse(
            turn=turn,
            choices=[processor_pb2.ChoiceDelta(finish_reason=reason)],
            finished=_finished(
                prompt=10 * turn,
                completion=len(sent),
                cached=10 * (turn - 1),
                media=4 * len(conversation.files),
            ),
        )

    async def Complete(
        self, request: processor_pb2.CompleteRequest, context: Any
    ) -> AsyncIterator[processor_pb2.CompleteResponse]:
        self.completions.append(request)
        await _fail_if_asked(request.text, context)
        yield processor_pb2.CompleteResponse(
            started=processor_pb2.TurnStarted(request_id="c", model=MODEL),
            choices=[processor_pb2.ChoiceDelta(text=" and so", token_count=2)],
        )
        yield processor_pb2.CompleteResponse(
            choices=[
                processor_pb2.ChoiceDelta(
                    text=" on", token_count=1, finish_reason=generation_pb2.FINISH_REASON_LENGTH
                )
            ],
            finished=_finished(prompt=4, completion=3, cached=0),
        )

    async def ListModels(
        self, request: processor_pb2.ListModelsRequest, context: Any
    ) -> processor_pb2.ListModelsResponse:
        return processor_pb2.ListModelsResponse(
            models=[
                processor_pb2.ServedModel(
                    name=MODEL,
                    ready=True,
                    context_length=2048,
                    answer_format=processor_pb2.AnswerFormat(
                        name="hermes", reason="set by --formats"
                    ),
                    text_files=processor_pb2.TextFiles(
                        tokenizer="tokenizer.json", chat_template="the checkpoint's"
                    ),
                    chat=True,
                    aliases=["gpt-4o"],
                    default_of=[
                        processor_pb2.MODEL_TASK_CHAT,
                        processor_pb2.MODEL_TASK_COMPLETE,
                    ],
                    modalities=[media_pb2.MODALITY_IMAGE, media_pb2.MODALITY_VIDEO],
                    workers=[
                        processor_pb2.ModelWorkers(role=role, connected=connected)
                        for connected, role in enumerate(_ROLES, 1)
                    ],
                ),
                processor_pb2.ServedModel(name="away", ready=False),
            ]
        )

    async def Tokenize(
        self, request: processor_pb2.TokenizeRequest, context: Any
    ) -> processor_pb2.TokenizeResponse:
        return processor_pb2.TokenizeResponse(token_ids=request.text.encode())

    async def Detokenize(
        self, request: processor_pb2.DetokenizeRequest, context: Any
    ) -> processor_pb2.DetokenizeResponse:
        return processor_pb2.DetokenizeResponse(text=bytes(request.token_ids).decode())

    async def Render(
        self, request: processor_pb2.RenderRequest, context: Any
    ) -> processor_pb2.RenderResponse:
        said = [part.text for message in request.start.messages for part in message.content]
        prompt = "|".join(said)
        return processor_pb2.RenderResponse(
            model=MODEL,
            rendered_prompt=prompt,
            token_ids=prompt.encode(),
            reading=processor_pb2.AnswerReading(model=MODEL, tools=request.start.tools),
        )

    async def Parse(
        self, requests: AsyncIterator[processor_pb2.ParseRequest], context: Any
    ) -> AsyncIterator[processor_pb2.ParseResponse]:
        async for request in requests:
            text = request.text or bytes(request.token_ids.ids).decode()
            if text:
                event = processor_pb2.OutputEvent(text=text)
                yield processor_pb2.ParseResponse(events=[event])
        yield processor_pb2.ParseResponse(finished=processor_pb2.ParseFinished())


def _words(question: str, conversation: _Conversation) -> list[str]:
    if question == "context":
        return ["|".join(f"{role}={text}" for role, text in conversation.said)]
    if question == "options":
        sampling = conversation.options.sampling
        set_ones = sorted(f"{f.name}={value:g}" for f, value in sampling.ListFields())
        return [" ".join([*set_ones, f"stop={','.join(conversation.options.stop)}"])]
    words = [word + " " for word in conversation.said[-1][1].split()]
    return ["You ", "said: ", *words[:-1], words[-1].rstrip()]


def _finished(
    prompt: int, completion: int, cached: int, media: int = 0
) -> processor_pb2.TurnFinished:
    return processor_pb2.TurnFinished(
        usage=usage_pb2.GenerationUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            cached_tokens=cached,
            media_tokens=media,
        )
    )


async def _fail_if_asked(question: str, context: Any) -> None:
    if (status := _FAILURES.get(question)) is not None:
        await _abort(context, status)


async def _abort(context: Any, status: status_pb2.Status) -> None:
    (code,) = (each for each in grpc.StatusCode if each.value[0] == status.code)
    details = ("grpc-status-details-bin", status.SerializeToString())
    await context.abort(code, status.message, (details,))


def _failure(
    code: int, message: str, reason: str, *more: Message, **metadata: str
) -> status_pb2.Status:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="millstream.io", metadata=metadata)
    status = status_pb2.Status(code=code, message=message)
    for detail in (info, *more):
        status.details.add().Pack(detail)
    return status


def _too_large(chunk: media_pb2.MediaChunk) -> status_pb2.Status:
    sentence = f"the file has {chunk.total_bytes} bytes; at most 3145728 are allowed"
    return _failure(code_pb2.INVALID_ARGUMENT, sentence, "INVALID_REQUEST", retryable="false")


_Violation = error_details_pb2.BadRequest.FieldViolation
_FAILURES = {
    "bad": _failure(
        code_pb2.INVALID_ARGUMENT,
        "two fields are wrong",
        "INVALID_REQUEST",
        error_details_pb2.BadRequest(
            field_violations=[
                _Violation(field="options.sampling.top_p", description="must be in (0, 1]"),
                _Violation(field="messages[0].role", description="must be set"),
            ]
        ),
    ),
    "busy": _failure(
        code_pb2.RESOURCE_EXHAUSTED,
        "no room right now",
        "OVERLOADED",
        error_details_pb2.RetryInfo(
            retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)
        ),
    ),
    "internal": _failure(code_pb2.INTERNAL, "a fault of the server", "INTERNAL", error_id="e-42"),
    "blind": _failure(
        code_pb2.INVALID_ARGUMENT,
        "the model fake takes no images; ListModels says what a model takes",
        "UNSUPPORTED_FEATURE",
        retryable="false",
    ),
}


class FakeServer:
    """Serves a FakeProcessor and health; an async context manager."""

    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.processor = FakeProcessor()
        self._address = address
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        processor_pb2_grpc.add_ProcessorServiceServicer_to_server(self.processor, self._server)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        port = self._server.add_insecure_port(self._address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        await self._server.stop(0)
