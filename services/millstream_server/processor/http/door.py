"""The endpoints, and /v1/chat/completions: a body becomes a conversation of the pipeline."""

from __future__ import annotations

from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.http import bodies, requests, schema
from millstream_server.processor.http.anthropic import Anthropic
from millstream_server.processor.http.chat_shape import ChatShape
from millstream_server.processor.http.chats import Asked, is_read, output_of, run
from millstream_server.processor.http.completions import Completions
from millstream_server.processor.http.errors import refuse
from millstream_server.processor.http.model_list import ModelList
from millstream_server.processor.http.responses import ResponsesApi
from millstream_server.runtime.lifecycle.server import Server
from millstream_server.runtime.rpc.http import Endpoint, HttpCall


class Door:
    """Serves chats, and registers all other endpoints; one per process."""

    def __init__(self, core: ProcessorCore) -> None:
        self._core = core
        self._threads = core.prompts.threads

    def register(self, server: Server) -> None:
        """Serve on the port that clients reach."""
        endpoints = [Endpoint("POST", "/v1/chat/completions", self.chat, refuse)]
        for others in (Completions, ModelList, ResponsesApi, Anthropic):
            endpoints += others(self._core).endpoints()
        server.serve_http(endpoints, refuse)

    async def chat(self, body: bytes, call: HttpCall) -> None:
        asked = await bodies.read(self._threads, body, requests.read_chat)
        output = output_of(ChatShape(), asked, call)
        chat = Asked(
            model=asked.model,
            tools=requests.tools_of(asked),
            answers=requests.answers_of(asked, events=self._is_read(asked)),
            options=requests.chat_options(asked),
            messages=lambda conversation: requests.messages_of(asked, conversation),
        )
        await run(self._core, chat, output, call)

    def _is_read(self, asked: schema.Chat) -> bool:
        told = bool(asked.tools) and asked.tool_choice != "none"
        form = asked.response_format
        constrained = form is not None and form.type != "text"
        return is_read(self._core, asked.model, told_tools=told, constrained=constrained)
