"""The endpoints: a request of HTTP becomes a conversation or a completion of the pipeline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from millstream_server.generation.request import LogprobOptions
from millstream_server.processor.conversation import Caller, Completion
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.diffusion.core import DiffusionCore
from millstream_server.processor.embedding.core import VectorsCore
from millstream_server.processor.http import requests, schema
from millstream_server.processor.http.anthropic import Anthropic
from millstream_server.processor.http.chat_shape import ChatShape
from millstream_server.processor.http.chats import Asked, is_read, prepare, run, send
from millstream_server.processor.http.completion_shape import CompletionShape
from millstream_server.processor.http.errors import refuse
from millstream_server.processor.http.images import ImageEndpoints
from millstream_server.processor.http.openapi import document
from millstream_server.processor.http.output import Events, Shape, Whole, encode
from millstream_server.processor.http.page import Page
from millstream_server.processor.http.tokens import TokenEndpoints, rendered
from millstream_server.processor.http.vectors import VectorEndpoints
from millstream_server.processor.output import PulledOutput
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.lifecycle.server import Server
from millstream_server.runtime.rpc.http import EVENTS, Endpoint, HttpCall

_CHATS = msgspec.json.Decoder(schema.Chat)
_COMPLETIONS = msgspec.json.Decoder(schema.Completion)
_DEFAULT_MAX_TOKENS = 16
"""Of a completion that names none, as OpenAI has it."""


class Door:
    """Serves OpenAI's API, and registers Anthropic's; one per process."""

    def __init__(
        self, core: ProcessorCore, vectors: VectorsCore, diffusion: DiffusionCore, *, page: bool
    ) -> None:
        """Serve with these; with ``page`` the page for browsers, too."""
        self._core = core
        self._endpoints = [
            Endpoint("POST", "/v1/chat/completions", self.chat, refuse),
            Endpoint("POST", "/v1/chat/completions/render", self.render, refuse),
            Endpoint("POST", "/v1/completions", self.complete, refuse),
            Endpoint("GET", "/v1/models", self.models, refuse),
            Endpoint("GET", "/openapi.json", self.openapi, refuse),
            *Anthropic(core).endpoints(),
            *VectorEndpoints(core.front, vectors, core.prompts.threads).endpoints(),
            *ImageEndpoints(core.front, diffusion, core.prompts.threads).endpoints(),
            *TokenEndpoints(core).endpoints(),
            *(Page().endpoints() if page else ()),
        ]
        self._created = int(time.time())
        self._document = b""

    def register(self, server: Server) -> None:
        """Serve on the port that clients reach."""
        server.serve_http(self._endpoints, refuse)

    async def openapi(self, _body: bytes, call: HttpCall) -> None:
        """Describe the endpoints."""
        if not self._document:  # made when it is first asked for; it takes some 20 ms
            self._document = await asyncio.to_thread(document, self._endpoints)
        await call.write(self._document)

    async def models(self, _body: bytes, call: HttpCall) -> None:
        """List what clients may name, aliases too."""
        names = [
            (name, model)
            for model in self._core.models.status()
            for name in (model.name, *model.aliases)
        ]
        data = [
            _Model(
                name, self._created, model.name, sorted(task.name.lower() for task in model.tasks)
            )
            for name, model in names
        ]
        await call.write(encode(_Models(data)))

    async def chat(self, body: bytes, call: HttpCall) -> None:
        asked = schema.read(_CHATS, body)
        output = _output(ChatShape(), asked, call)
        await run(self._core, self._asked(asked), output, call)

    async def render(self, body: bytes, call: HttpCall) -> None:
        """Return what a chat would send to a worker."""
        asked = schema.read(_CHATS, body)
        prepared = await prepare(self._core, self._asked(asked), call)
        await call.write(encode(rendered(prepared)))

    def _asked(self, asked: schema.Chat) -> Asked:
        return Asked(
            model=asked.model,
            tools=requests.tools_of(asked),
            answers=requests.answers_of(asked, events=self._is_read(asked)),
            options=requests.chat_options(asked),
            messages=lambda conversation: requests.messages_of(asked, conversation),
        )

    def _is_read(self, asked: schema.Chat) -> bool:
        told = bool(asked.tools) and asked.tool_choice != "none"
        form = asked.response_format
        constrained = form is not None and form.type != "text"
        return is_read(self._core, asked.model, told_tools=told, constrained=constrained)

    async def complete(self, body: bytes, call: HttpCall) -> None:
        asked = schema.read(_COMPLETIONS, body)
        core = self._core
        with core.front.call():
            output = _output(CompletionShape(), asked, call)
            completion = _completion(asked, call.request_id)
            turn = await core.complete(completion, Caller.of(call), call, output)
            await send(core, turn, output, call)


def _output(shape: Shape, asked: schema.Generation, call: HttpCall) -> PulledOutput:
    if not asked.stream:
        if asked.stream_options is not None:
            raise InvalidRequestError.of("stream_options", "needs stream")
        return Whole(shape, call.request_id)
    call.respond(EVENTS)
    given = asked.stream_options
    return Events(shape, call.request_id, usage=bool(given and given.include_usage))


def _completion(asked: schema.Completion, request_id: str) -> Completion:
    n = 1 if asked.n is None else asked.n
    if asked.best_of not in (None, n):
        raise InvalidRequestError.of("best_of", "must be n, or left out")
    most = _DEFAULT_MAX_TOKENS if asked.max_tokens is None else asked.max_tokens
    logprobs = None
    if asked.logprobs is not None:
        logprobs = LogprobOptions(top=requests.checked_top(asked.logprobs, "logprobs"))
    options = requests.options_of(asked, {"max_new_tokens": most}, logprobs=logprobs)
    return Completion(
        model=asked.model,
        request_id=request_id,
        prompt=_prompt(asked.prompt),
        options=options,
    )


def _prompt(given: str | list[Any]) -> str | Sequence[int]:
    """Return the one prompt.

    Raises:
        InvalidRequestError: there are several, or it is neither text nor token ids.
    """
    if isinstance(given, list) and len(given) == 1 and not isinstance(given[0], int):
        given = given[0]  # a list of one prompt
    if isinstance(given, str):
        return given
    if isinstance(given, list) and given and isinstance(given[0], str | list):
        raise InvalidRequestError.of("prompt", "one prompt in a request; send several requests")
    try:
        return msgspec.convert(given, schema.Ids)
    except msgspec.ValidationError:
        raise InvalidRequestError.of("prompt", "must be a text or a list of token ids") from None


class _Model(msgspec.Struct):
    id: str
    created: int
    root: str
    tasks: list[str]
    object: str = "model"
    owned_by: str = "millstream"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"
