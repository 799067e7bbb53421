"""One trace of a chat with a picture: Processor → encode, prefill with its fetch, decode."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_testing.waiting import until
from tests.e2e.multimodal.conftest import NAME, Suite
from tests.support.media.vision_chats import Question, photo
from tests.support.processor.chats import Conversation, options, start
from tests.support.telemetry.otlp_collector import Received
from tests.support.telemetry.spans import INCOMING, SPAN_ID, TRACE_ID

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

_FETCH = "millstream.v1.EncodeService/Fetch"


async def test_one_trace_with_the_way_of_the_embedding(suite: Suite, stub: Any) -> None:
    chat = Conversation(stub, metadata=INCOMING)
    question = Question.of("What is ", photo(96, 96, seed=777), "?")
    await chat.say(start(messages=[question.message], opts=options(8, ignore_eos=True)))
    (answer,) = await chat.end()

    def ours() -> list[Received]:
        return [span for span in suite.collector.spans if span.trace_id == TRACE_ID]

    def named(name: str) -> Received:
        (span,) = (span for span in ours() if span.name == name)
        return span

    def below(parent: Received) -> list[Received]:
        return [span for span in ours() if span.parent_id == parent.span_id]

    legs = ("encode", "prefill", "decode")
    served = [f"{leg} {NAME}" for leg in legs]
    expected = {*legs, *served, "fetch embedding", _FETCH, f"chat {NAME}"}
    expected.add("millstream.v1.ProcessorService/Chat")
    await until(lambda: expected <= {span.name for span in ours()}, 30)
    await until(lambda: all(below(named(f"{leg} {NAME}")) for leg in ("prefill", "decode")), 30)

    rpc, turn = named("millstream.v1.ProcessorService/Chat"), named(f"chat {NAME}")
    assert (rpc.parent_id, turn.parent_id) == (SPAN_ID, rpc.span_id)
    assert turn.attributes["millstream.usage.media_tokens"] == answer.usage.media_tokens == 9
    assert sorted(span.name for span in below(turn)) == sorted(legs)
    for leg, service in zip(legs, served, strict=True):
        (span,) = below(named(leg))
        assert (span.name, span.service) == (service, f"millstream-{leg}")
    fetch = named("fetch embedding")
    assert fetch.parent_id == named(f"prefill {NAME}").span_id
    (handed_out,) = below(fetch)
    assert (handed_out.name, handed_out.service) == (_FETCH, "millstream-encode")
    for span in (fetch, handed_out):
        assert span.attributes["millstream.embedding.way"] == "shared_memory"
        assert span.attributes["millstream.embedding.bytes"] == 9 * 256 * 4
    assert {span.service for span in below(named(f"decode {NAME}"))} == {"sglang"}
    assert not any(span.failed for span in ours())
