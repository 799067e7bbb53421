"""The endpoints, and /v1/chat/completions: a body becomes a conversation of the pipeline."""

from __future__ import annotations

import asyncio

from millstream_server.processor.http import bodies, requests, schema
from millstream_server.processor.http.anthropic import Anthropic
from millstream_server.processor.http.chat_shape import ChatShape
from millstream_server.processor.http.chats import Asked, output_of, prepare, run, tell_seed
from millstream_server.processor.http.completions import Completions
from millstream_server.processor.http.errors import refuse
from millstream_server.processor.http.images import ImageEndpoints
from millstream_server.processor.http.model_list import ModelEndpoints
from millstream_server.processor.http.openapi import document
from millstream_server.processor.http.output import encode
from millstream_server.processor.http.page import Page
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.http.responses.api import ResponsesApi
from millstream_server.processor.http.tokens import TokenEndpoints, rendered
from millstream_server.processor.http.vectors import VectorEndpoints
from millstream_server.processor.text.messages import ChatMessage
from millstream_server.runtime.lifecycle.server import Server
from millstream_server.runtime.rpc.http import Endpoint, HttpCall


class Door:
    """Serves chats, and registers all other endpoints; one per process."""

    def __init__(self, pipeline: Pipeline, *, page: bool) -> None:
        """Serve with these; with ``page`` the page for browsers, too."""
        self._pipeline = pipeline
        self._threads = pipeline.threads
        self._endpoints = [
            Endpoint("POST", "/v1/chat/completions", self.chat, refuse),
            Endpoint("POST", "/v1/chat/completions/render", self.render, refuse),
            Endpoint("GET", "/openapi.json", self.openapi, refuse),
            *Completions(pipeline).endpoints(),
            *ModelEndpoints(pipeline.texts).endpoints(),
            *ResponsesApi(pipeline).endpoints(),
            *Anthropic(pipeline).endpoints(),
            *VectorEndpoints(pipeline).endpoints(),
            *ImageEndpoints(pipeline).endpoints(),
            *TokenEndpoints(pipeline).endpoints(),
            *(Page().endpoints() if page else ()),
        ]
        self._document = b""

    def register(self, server: Server) -> None:
        """Serve on the port that clients reach."""
        server.serve_http(self._endpoints, refuse)

    async def openapi(self, _body: bytes, call: HttpCall) -> None:
        """Describe the endpoints."""
        if not self._document:  # made when it is first asked for; it takes some 20 ms
            self._document = await asyncio.to_thread(document, self._endpoints)
        await call.write(self._document)

    async def chat(self, body: bytes, call: HttpCall) -> None:
        asked, messages = await bodies.read(self._threads, body, requests.read_chat)
        output = output_of(ChatShape(), asked, call)
        await run(self._pipeline, _asked(asked, messages), output, call)

    async def render(self, body: bytes, call: HttpCall) -> None:
        """Return what a chat would send to a worker."""
        asked, messages = await bodies.read(self._threads, body, requests.read_chat)
        prepared = await prepare(self._pipeline, _asked(asked, messages), call)
        tell_seed(prepared.options, call)
        await call.write(encode(rendered(prepared)))


def _asked(asked: schema.Chat, messages: tuple[ChatMessage, ...]) -> Asked:
    return Asked(
        model=asked.model,
        tools=requests.tools_of(asked),
        answers=requests.answers_of(asked),
        options=requests.chat_options(asked),
        messages=messages,
    )
