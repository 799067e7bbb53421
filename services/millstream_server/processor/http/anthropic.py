"""Anthropic's endpoints, and its errors: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from millstream_server.processor.answer_options import CONTINUE
from millstream_server.processor.http import anthropic_requests as requests
from millstream_server.processor.http import bodies
from millstream_server.processor.http.anthropic_output import MessageEvents, WholeMessage, event
from millstream_server.processor.http.chats import Asked, run
from millstream_server.processor.http.errors import sentence
from millstream_server.processor.http.output import encode
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.text.messages import ConversationPaths
from millstream_server.processor.texts import UntokenizedChat
from millstream_server.runtime.errors import Failure
from millstream_server.runtime.rpc.http import (
    EVENTS,
    Endpoint,
    HttpCall,
    Refusal,
    retry_after,
    status_of,
)

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TOO_LONG = re.compile(
    r"(\d+) prompt tokens and max_tokens (\d+) exceed the context length of (\d+) tokens"
)
_RENAMED = (
    ("].function.parameters", "].input_schema"),
    ("].function.strict", "].strict"),
    ("response_format", "output_config.format"),
    ("continue_final_message", "messages"),
)
"""Names of OpenAI's API as names of this one."""


class TokenCount(msgspec.Struct):
    """The answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageError(msgspec.Struct):
    """A failure, as Anthropic says it."""

    type: str
    message: str


class MessageErrorBody(msgspec.Struct):
    """The body of a failure at Anthropic's endpoints."""

    type: Literal["error"]
    error: MessageError


class Anthropic:
    """Serves the Messages API; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._threads = pipeline.threads

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/messages", self.messages, refuse),
            Endpoint("POST", "/v1/messages/count_tokens", self.count, refuse),
        ]

    async def messages(self, body: bytes, call: HttpCall) -> None:
        asked, messages = await bodies.read(self._threads, body, requests.read_messages)
        if asked.stream:
            call.respond(EVENTS)
        chat = Asked(
            model=asked.model,
            tools=requests.tools_of(asked),
            answers=requests.answers_of(asked),
            options=requests.options_of(asked),
            messages=messages,
        )
        await run(self._pipeline, chat, MessageEvents() if asked.stream else WholeMessage(), call)

    async def count(self, body: bytes, call: HttpCall) -> None:
        asked, messages = await bodies.read(self._threads, body, requests.read_count)
        answers = requests.answers_of(asked)
        chat = UntokenizedChat(
            model=asked.model,
            messages=messages,
            tools=requests.tools_of(asked),
            answers=answers,
            paths=ConversationPaths(continues=CONTINUE if answers.continues else ""),
        )
        tokens = await self._pipeline.texts.of_chat(chat)
        await call.write(encode(TokenCount(len(tokens.ids))))


def refuse(failure: Failure) -> Refusal:
    """Return the response of a failure, as Anthropic's API says it."""
    status = status_of(failure)
    error = MessageError(_TYPES.get(status, "api_error"), _sentence(failure))
    return Refusal(
        status=status,
        body=encode(MessageErrorBody("error", error)),
        headers=retry_after(failure),
        event=event("error", error=error),
    )


def _sentence(failure: Failure) -> str:
    """Return what a failure says, in the names of this API.

    Clients read the numbers of a context that is too small, and try again with less.
    """
    said = sentence(failure)
    if (found := _TOO_LONG.search(said)) is not None:
        prompt, most, context = map(int, found.groups())
        if prompt >= context:
            return f"prompt is too long: {prompt} tokens > {context} maximum"
        return f"input length and `max_tokens` exceed context limit: {prompt} + {most} > {context}"
    for name, here in _RENAMED:
        said = said.replace(name, here)
    return said
