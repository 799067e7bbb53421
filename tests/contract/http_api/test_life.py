"""A chat by HTTP is one of the pipeline: keys, queue, readers that leave, drain, metrics, spans."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any

import openai
import pytest

from millstream_server.processor.admission import QueueLimits
from millstream_server.processor.requests import RequestLimits
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.telemetry import metrics
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, MODEL, processor, suite, worker
from millstream_testing.waiting import until
from tests.support.clients.http_api import CHAT, HI, ask, client
from tests.support.telemetry.logged import events
from tests.support.telemetry.spans import (
    TRACE_ID,
    TRACEPARENT,
    SpanLog,
    id_of,
    parent_of,
    trace_of,
)
from tests.support.wire.http_service import post, raw

SLOW = replace(ALPHABET, step_s=0.02)
LONG: Any = {**HI, "max_tokens": 400}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return TextModel.load(alphabet_model(tmp_path_factory.mktemp("plain") / "model"))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_reader_that_leaves_frees_the_worker(model: TextModel, *, stream: bool) -> None:
    async with suite(model, SLOW) as (front, one):
        async with raw(front.port) as wire:
            wire.send(post(CHAT, json.dumps({**LONG, "stream": stream}).encode()))
            await one.until_running(1)
        await one.until_idle()
        assert front.core.work.count == 0


async def test_a_stream_sends_a_token_when_it_is_made(model: TextModel) -> None:
    async with suite(model, SLOW) as (front, _), client(front.address) as api:
        body = {**HI, "max_tokens": 10}
        stream = await api.chat.completions.create(**body, stream=True)
        texts = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(text or "" for text in texts) == "ABCDEFGHIJ"
    assert len(texts) > 5


async def test_a_full_queue_is_429_and_says_when_to_retry(model: TextModel) -> None:
    limits = RequestLimits(queue=QueueLimits(max_running=1, max_queued=0))
    async with (
        worker(SLOW) as one,
        processor({MODEL: model}, [one.address], limits=limits) as front,
        raw(front.port) as wire,
    ):
        wire.send(post(CHAT, json.dumps({**LONG, "stream": True}).encode()))
        await one.until_running(1)
        response = await ask(front.port, CHAT, HI)
        assert response.status == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json["error"]["code"] == "rate_limit_exceeded"
        async with client(front.address) as api:
            with pytest.raises(openai.RateLimitError):
                await api.chat.completions.create(**HI, stream=True)


async def test_without_workers_it_is_503(model: TextModel) -> None:
    async with processor({MODEL: model}, ["127.0.0.1:1"], wait=False) as front:
        response = await ask(front.port, CHAT, HI)
        assert (response.status, response.json["error"]["code"]) == (503, "no_worker")
        assert int(response.headers["retry-after"]) >= 1


async def test_a_drain_lets_answers_end(model: TextModel) -> None:
    async with suite(model, SLOW) as (front, _), client(front.address) as api:
        stream = await api.chat.completions.create(**HI, max_tokens=20, stream=True)
        draining = asyncio.ensure_future(front.core.work.drain(0, 5, front.server.stop_accepting))
        texts = [c.choices[0].delta.content or "" async for c in stream]
        assert "".join(texts) == "ABCDEFGHIJKLMNOPQRST"
        assert await draining


async def test_a_request_is_a_span_in_the_callers_trace(model: TextModel) -> None:
    spans = SpanLog()
    headers = f"traceparent: {TRACEPARENT}\r\n"
    async with (
        worker() as one,
        processor({MODEL: model}, [one.address], tracing=spans.tracing) as front,
    ):
        await ask(front.port, CHAT, {**HI, "max_tokens": 1}, headers=headers)
        await until(lambda: any(span.name == f"POST {CHAT}" for span in spans.ended))
        request, turn = spans.named(f"POST {CHAT}"), spans.named(f"chat {MODEL}")
    assert trace_of(request) == TRACE_ID
    assert parent_of(turn) == id_of(request)
    assert request.attributes is not None
    assert request.attributes["http.response.status_code"] == 200


async def test_requests_count_in_metrics_and_logs(
    model: TextModel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    labels = ("POST", CHAT, "200")
    before = metrics.HTTP_SERVER_DURATION.labels(*labels)._sum.get()
    async with suite(model) as (front, _):
        headers = "X-Request-Id: mine\r\ntraceparent: 00-{}-{}-01\r\n".format("ab" * 16, "cd" * 8)
        await ask(front.port, CHAT, {**HI, "max_tokens": 1}, headers=headers)
    assert metrics.HTTP_SERVER_DURATION.labels(*labels)._sum.get() > before
    (line,) = events(caplog, "turn ended")
    assert (line["request"], line["trace_id"]) == ("mine", "ab" * 16)
