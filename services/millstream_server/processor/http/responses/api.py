"""OpenAI's Responses API, without a memory: /v1/responses."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from millstream_server.processor.http import bodies
from millstream_server.processor.http.chats import Asked, run
from millstream_server.processor.http.errors import refuse, refused, renamed, sentence
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.http.responses import schema
from millstream_server.processor.http.responses.input import read_body
from millstream_server.processor.http.responses.output import (
    ResponseEvents,
    ResponseOutput,
    WholeResponse,
)
from millstream_server.processor.http.responses.requests import answers_of, response_options
from millstream_server.processor.http.responses.shown import Shown
from millstream_server.processor.http.responses.tools import Tools, grammar_seconds
from millstream_server.runtime.errors import Failure
from millstream_server.runtime.rpc.http import EVENTS, Endpoint, HttpCall, Refusal

_RENAMED = (
    (re.compile(r"\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\.function\.(?=parameters|arguments|strict)"), "."),
    (re.compile(r"\.tool_call_id\b"), ".call_id"),
)
_PLACES = re.compile(
    r"\bstart\.tools\[(?P<tool>\d+)\]\.(?P<field>\w+)|\binput\[\d+\]\.tool_calls\[\d+\]"
)
"""Of the pipeline, which aren't the body's."""
_TOO_MANY, _SERVER_FAULT = 429, 500


class ResponsesApi:
    """Serves the Responses API; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._threads = pipeline.threads

    def endpoints(self) -> list[Endpoint]:
        return [Endpoint("POST", "/v1/responses", self.respond, refuse)]

    async def respond(self, body: bytes, call: HttpCall) -> None:
        read = await bodies.read(self._threads, body, read_body)
        asked = read.asked
        tools = await self._tools(asked)
        answers = answers_of(asked, tools)
        shown = Shown(asked, tools)
        output: ResponseOutput
        if asked.stream:
            call.respond(EVENTS)
            output = ResponseEvents(shown, tools, call.request_id)
        else:
            output = WholeResponse(shown, tools, call.request_id)
        names = _Names(tools, output, read.calls)
        call.refuse = names.refuse
        chat = Asked(
            model=asked.model,
            tools=tools.told,
            answers=answers,
            options=response_options(asked),
            messages=read.messages,
            field="input",
        )
        await run(self._pipeline, chat, output, call)

    async def _tools(self, asked: schema.Responses) -> Tools:
        given, items = asked.tools or (), asked.input if isinstance(asked.input, list) else ()
        seconds = sum(map(grammar_seconds, (given, *[item.tools or () for item in items])))
        if not seconds:
            return Tools(given, items)
        return await self._threads.run(lambda: Tools(given, items), seconds)


class _Names:
    """Says failures in the names of the request's own body, and ends streams as this API does."""

    def __init__(self, tools: Tools, output: ResponseOutput, calls: Mapping[str, str]) -> None:
        """``calls``: see `Read`."""
        self._tools = tools
        self._output = output
        self._calls = calls

    def refuse(self, failure: Failure) -> Refusal:
        """Return the response of a failure."""
        refusal = refused(failure, self._renamed)
        if not isinstance(self._output, ResponseEvents):
            return refusal
        kind = "server_error" if refusal.status >= _SERVER_FAULT else "invalid_prompt"
        code = "rate_limit_exceeded" if refusal.status == _TOO_MANY else kind
        event = self._output.failed(code, sentence(failure, self._renamed))
        return dataclasses.replace(refusal, event=event)

    def _renamed(self, text: str) -> str:
        text = renamed(_PLACES.sub(self._place, text))
        for pattern, name in _RENAMED:
            text = pattern.sub(name, text)
        return text

    def _place(self, found: re.Match[str]) -> str:
        if (tool := found["tool"]) is None:
            return self._calls.get(found[0], found[0])
        return self._tools.field(int(tool), found["field"])
