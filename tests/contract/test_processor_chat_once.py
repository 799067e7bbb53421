"""ChatOnce: Chat of one turn, for clients that can't send a stream."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import MODEL, InProcessProcessor, processor, worker
from tests.support.processor.chats import chat, gather, options, start
from tests.support.wire.failures import refusal


def _once(front: InProcessProcessor, *texts: str, **fields: Any) -> Any:
    asked = start(*texts, **fields).start
    return front.stub.ChatOnce(processor_pb2.ChatOnceRequest(start=asked))


async def test_it_answers_as_chat_does(text_model: TextModel) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        opts = options(7, ignore_eos=True)
        once = await gather(_once(front, "Hello", opts=opts, request_id="mine"))
        answer = await chat(front.stub, "Hello", opts=opts)
    assert once.started is not None
    assert (once.started.request_id, once.started.model) == ("mine", MODEL)
    assert once.choices[0].text == answer.choices[0].text != ""
    assert once.usage.completion_tokens == 7


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (processor_pb2.ChatOnceRequest(), "start"),
        (processor_pb2.ChatOnceRequest(start=processor_pb2.ChatStart()), "start.messages"),
    ],
)
async def test_a_start_that_is_missing_or_wrong(
    text_model: TextModel, request_: processor_pb2.ChatOnceRequest, field: str
) -> None:
    async with worker() as one, processor({MODEL: text_model}, [one.address]) as front:
        refused = await refusal(front.stub.ChatOnce(request_))
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.fields == (field,)
