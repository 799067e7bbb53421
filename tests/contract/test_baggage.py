"""The client's trace context on its way to the workers: traceparent, tracestate and baggage."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from millstream_server.control.engine import Role
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.telemetry.trace_context import TraceContext
from tests.support.processor.chats import Conversation, options, start
from tests.support.processor.starts import kept_starts
from tests.support.processor.traced_suite import traced_suite
from tests.support.telemetry.spans import INCOMING, SpanLog, trace_of

PAIR = (Role.PREFILL, Role.DECODE)
RPC = "millstream.v1.ProcessorService/Chat"


@pytest.mark.parametrize("roles", [(Role.AGGREGATED,), PAIR])
@pytest.mark.parametrize(
    "metadata",
    [
        (("baggage", "tenant=blue"),),
        (("baggage", "tenant=blue"), ("tracestate", "vendor=1")),
        INCOMING,
    ],
)
async def test_every_part_of_the_clients_context_reaches_the_workers(
    text_model: TextModel, metadata: Sequence[tuple[str, str]], roles: Sequence[Role]
) -> None:
    with kept_starts() as starts:
        async with traced_suite(text_model, None, roles=roles) as suite:
            conversation = Conversation(suite.stub, metadata=metadata)
            await conversation.say(start("hi", opts=options(2)))
            await conversation.end()
    assert [asked.trace for _, asked in starts] == [TraceContext(**dict(metadata))] * len(roles)


async def test_baggage_alone_goes_on_with_the_spans(text_model: TextModel) -> None:
    spans = SpanLog()
    with kept_starts() as starts:
        async with traced_suite(text_model, spans) as suite:
            conversation = Conversation(suite.stub, metadata=(("baggage", "tenant=blue"),))
            await conversation.say(start("hi", opts=options(2)))
            await conversation.end()
            await spans.until_ended(4)
    ((_, asked),) = starts
    assert asked.trace.baggage == "tenant=blue"
    assert asked.trace.trace_id == trace_of(spans.named(RPC))
