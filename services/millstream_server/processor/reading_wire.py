"""Conversion of what Render and Parse exchange. No side effects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from millstream.v1 import media_pb2, processor_pb2
from millstream_server.formats.choosing import AnswerFormat
from millstream_server.formats.events import Event
from millstream_server.generation.wire import write_sampling
from millstream_server.processor.answer import Reading, going_on, reading_of
from millstream_server.processor.chat_requests import PreparedTurn
from millstream_server.processor.conversation import Conversation
from millstream_server.processor.convert import tools_from_proto
from millstream_server.processor.parse import ParsedAnswer
from millstream_server.processor.responses import add_calls, add_events
from millstream_server.processor.text.messages import MAX_VIOLATIONS, check_tools
from millstream_server.protobuf.media import MODALITIES_TO_PROTO
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.work.pool import WorkPool

_SMALL_CHARS = 4096
"""Schemas up to here are checked on the event loop, in about 1 ms."""
_SECONDS_PER_CHAR = 0.3e-6


def rendered_to_proto(
    prepared: PreparedTurn, conversation: Conversation
) -> processor_pb2.RenderResponse:
    """Convert all but the token ids, which may be many."""
    request, reading = prepared.request, prepared.reading
    response = processor_pb2.RenderResponse(
        model=request.model,
        rendered_prompt=prepared.text,
        stop_token_ids=prepared.served.text.eos_token_ids,
    )
    for item in request.prompt.media:
        response.media.add(
            modality=MODALITIES_TO_PROTO[item.modality],
            digest=item.digest,
            spans=[media_pb2.TokenSpan(start=s.start, length=s.length) for s in item.spans],
        )
    write_sampling(response.sampling, request.sampling)
    if reading is not None:
        message = response.reading
        message.model = request.model
        message.format = reading.how.form.name
        message.prompt_end = reading.prompt_end
        message.one_call = reading.one_call
        message.begun = reading.begun
        for tool in conversation.told_tools:
            message.tools.add(
                name=tool.name,
                description=tool.description,
                parameters_json_schema=tool.parameters_json_schema,
            )
    return response


async def reading_from_proto(
    message: processor_pb2.AnswerReading, how: AnswerFormat | None, threads: WorkPool
) -> Reading:
    """Convert; ``how`` is the format that it names, or else the model's.

    Raises:
        ServingError: there is no such format, a tool can't be used, or too much text work waits.
    """
    tools = tools_from_proto(message.tools, "reading.tools")

    def check() -> None:
        if violations := tuple(islice(check_tools(tools, "reading.tools"), MAX_VIOLATIONS)):
            raise InvalidRequestError.of_all(violations)

    chars = sum(len(tool.parameters_json_schema) for tool in tools)
    if chars <= _SMALL_CHARS:
        check()
    else:
        await threads.run(check, chars * _SECONDS_PER_CHAR)
    if how is None:
        sentence = "is none of this server's: docs/formats.md has them all"
        if not message.format:
            sentence = "is needed: it isn't known how this model writes reasoning and tool calls"
        raise UnsupportedFeatureError.of("reading.format", sentence)
    reading = reading_of(how, tools, message.prompt_end, one_call=message.one_call)
    return await going_on(reading, message.begun, "reading.begun", threads)


def parsed_to_proto(answer: ParsedAnswer, events: Sequence[Event]) -> processor_pb2.ParseResponse:
    """Convert the last response."""
    response = processor_pb2.ParseResponse()
    add_events(response, events)
    response.finished.reasoning_tokens = answer.reasoning_tokens
    add_calls(response.finished, answer.whole_calls)
    return response
