"""One trace of a chat over real processes: client → Processor → prefill and decode → SGLang."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from millstream.v1 import processor_pb2_grpc
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.processes.suite import ServiceProcess, running
from tests.support.processor.chats import Conversation, options, start
from tests.support.telemetry.otlp_collector import Collector, Received, collecting
from tests.support.telemetry.spans import INCOMING, SPAN_ID, TRACE_ID

pytestmark = pytest.mark.sglang

TOKENS = 8
# Spans leave soon, not after five seconds.
_SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100"}


@dataclass
class Traced:
    """A disaggregated suite and the collector it sends to."""

    collector: Collector
    front: ServiceProcess


@pytest.fixture(scope="module")
def traced(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    logs = tmp_path_factory.mktemp("logs")
    with collecting() as collector:
        sent = {"otlp_endpoint": f"http://{collector.address}"}
        common = {**sent, "model_path": model, "model_name": "tiny", "max_total_tokens": 4096}
        prefill = ServiceProcess(
            "millstream_server.prefill",
            {**common, "bootstrap_port": free_port()},
            logs / "prefill.log",
            env=_SOON,
        )
        decode = ServiceProcess(
            "millstream_server.decode",
            {**common, "mode": "disaggregated"},
            logs / "decode.log",
            env=_SOON,
        )
        workers = f"{prefill.address},{decode.address}"
        front = ServiceProcess(
            "millstream_server.processor",
            {**sent, "models": f"tiny={model}", "workers": workers},
            logs / "front.log",
            env=_SOON,
        )
        with running(prefill, decode, front):
            yield Traced(collector, front)


@pytest.mark.timeout(360)
async def test_one_trace_from_the_clients_span_to_the_engines(traced: Traced) -> None:
    async with grpc.aio.insecure_channel(traced.front.address) as channel:
        stub = processor_pb2_grpc.ProcessorServiceStub(channel)
        conversation = Conversation(stub, metadata=INCOMING)
        asked = options(TOKENS, ignore_eos=True, temperature=0.0)
        await conversation.say(start("What is a mill?", opts=asked))
        (answer,) = await conversation.end()
    assert answer.usage.completion_tokens == TOKENS

    def ours() -> list[Received]:
        return [span for span in traced.collector.spans if span.trace_id == TRACE_ID]

    def children(parent: Received) -> list[Received]:
        return [span for span in ours() if span.parent_id == parent.span_id]

    def named(name: str) -> Received | None:
        return next((span for span in ours() if span.name == name), None)

    def arrived() -> bool:
        served = [named("prefill tiny"), named("decode tiny")]
        return named("chat tiny") is not None and all(span and children(span) for span in served)

    await until(arrived, 30)
    await until(lambda: named("millstream.v1.ProcessorService/Chat") is not None)
    rpc, turn = named("millstream.v1.ProcessorService/Chat"), named("chat tiny")
    assert rpc is not None
    assert turn is not None
    assert rpc.parent_id == SPAN_ID
    assert turn.parent_id == rpc.span_id
    assert turn.attributes["gen_ai.provider.name"] == "sglang"
    assert turn.attributes["gen_ai.usage.output_tokens"] == TOKENS
    assert sorted(span.name for span in children(turn)) == ["decode", "prefill"]
    for leg in children(turn):
        (served,) = children(leg)
        assert served.name == f"{leg.name} tiny"
        assert len({rpc.service, served.service}) == 2
        engine = children(served)
        assert engine
        assert {span.service for span in engine} == {"sglang"}
    # SGLang makes a span a stage of a request and none a token, and none for our own warm-up.
    engines = [span for span in traced.collector.spans if span.service == "sglang"]
    assert {span.trace_id for span in engines} == {TRACE_ID}
    assert not any("decode_loop" in span.name for span in engines)
    assert not any(span.failed for span in ours())
