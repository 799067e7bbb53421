"""The client library against a server that fails as it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
from opentelemetry import trace

from millstream.v1 import processor_pb2, processor_pb2_grpc
from millstream_client import (
    NO_RETRY,
    Client,
    DeadlineExceededError,
    IncompleteAnswerError,
    InternalError,
    MillstreamError,
    Options,
    OverloadedError,
    Retry,
    SyncClient,
    UnavailableError,
    assistant,
    user,
)
from millstream_server.runtime.errors import (
    OverloadedError as Overloaded,
)
from millstream_server.runtime.errors import (
    UnsupportedFeatureError as UnsupportedFeature,
)
from millstream_server.runtime.errors import (
    WorkerLostError as WorkerLost,
)
from millstream_testing.fake_processor import FakeProcessor
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.processor.scripted import Part, Scripted, broken, end, fail, hang, serving, text
from tests.support.vendor import trap

both = pytest.mark.parametrize("kind", KINDS)
QUICK = Retry(attempts=3, first_pause_s=0.01, wait_s=5.0)
STAYS = replace(QUICK, go_on=False)


# ---- sent again


@both
@pytest.mark.parametrize(
    "failure",
    [
        pytest.param([broken()], id="unavailable"),
        pytest.param([fail(WorkerLost("lost", retry_delay_s=0.0))], id="a worker lost"),
        pytest.param([fail(Overloaded("no room", retry_delay_s=0.0))], id="no room"),
        pytest.param([end], id="the stream ended"),
    ],
)
async def test_a_request_is_sent_again_while_nothing_of_its_answer_came(
    kind: Kind, failure: list[Part]
) -> None:
    script = Scripted(failure, [text("AB"), text("C")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        answer = await kind.run(client.chat("hi").answer)
        assert answer.text == "ABC"
        first, second = script.asked
        assert first == second
        assert first.start.request_id


@both
async def test_the_servers_delay_is_kept(kind: Kind) -> None:
    script = Scripted([fail(Overloaded("no room", retry_delay_s=0.3))], [text("A")], [], [])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        assert (await kind.run(client.chat("hi").answer)).text == "A"
        first, second = script.asked_at_s
        assert second - first >= 0.3


@both
async def test_a_delay_beyond_the_callers_patience_is_raised(kind: Kind) -> None:
    script = Scripted(*[[fail(Overloaded("no room", retry_delay_s=7.0))] for _ in range(3)])
    patience = Retry(attempts=3, max_pause_s=5.0)
    async with serving(script) as address, kind.connect(address, retry=patience) as client:
        failed = await kind.failure(client.chat("hi").answer)
        assert type(failed) is OverloadedError
        assert (failed.code, failed.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "OVERLOADED")
        assert (failed.retryable, failed.retry_delay_s) == (True, 7.0)
        assert "try again in 7 s" in str(failed)
        assert script.streams == 1
    async with serving(script) as address, kind.connect(address) as client:
        failed = await kind.failure(client.chat("hi", timeout_s=5.0).answer)
        assert type(failed) is OverloadedError  # No time left to wait for: told at once.
        failed = await kind.failure(client.chat("hi", timeout_s=5.0).answer)
        assert script.streams == 3


@both
@pytest.mark.parametrize(
    ("part", "error"),
    [
        pytest.param(fail(Overloaded("no room", retry_delay_s=0.0)), OverloadedError, id="no room"),
        pytest.param(broken(), UnavailableError, id="unavailable, which gRPC itself would retry"),
    ],
)
async def test_attempts_end(kind: Kind, part: Part, error: type[MillstreamError]) -> None:
    script = Scripted(*[[part] for _ in range(5 * QUICK.attempts)])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        failed = await kind.failure(client.chat("hi").answer)
        assert type(failed) is error
        assert isinstance(failed.__cause__, grpc.RpcError)
        assert script.streams == QUICK.attempts


@both
@pytest.mark.parametrize("part", [broken(), end], ids=["unavailable", "end"])
async def test_no_retry_sends_once(kind: Kind, part: Part) -> None:
    script = Scripted([part], [text("A")])
    async with serving(script) as address, kind.connect(address, retry=NO_RETRY) as client:
        failed = await kind.failure(client.chat("hi").answer)
        assert isinstance(failed, UnavailableError)
        reason = "" if part is end else "CONNECTION_LOST"
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, reason)
        assert script.streams == 1


@both
async def test_what_helps_nobody_is_not_sent_again(kind: Kind) -> None:
    script = Scripted([fail(ZeroDivisionError())], [text("A")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        failed = await kind.failure(client.chat("hi", request_id="mine").answer)
        assert type(failed) is InternalError
        assert (failed.reason, failed.retryable, failed.request_id) == ("INTERNAL", False, "mine")
        assert failed.error_id
        assert script.streams == 1


@both
async def test_calls_with_one_answer_are_sent_again_too(kind: Kind) -> None:
    script = Scripted([fail(Overloaded("no room", retry_delay_s=0.2))], [], [broken()] * 1)
    script.turns += [[broken()]] * 40
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        assert await kind.run(client.models) == []
        first, second = script.asked_at_s
        assert second - first >= 0.2
        failed = await kind.failure(client.models, timeout_s=0.5)
        assert isinstance(failed, (UnavailableError, DeadlineExceededError))
        assert failed.partial is None


@both
async def test_a_client_waits_for_a_server_that_is_not_there_yet(kind: Kind) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    async with kind.connect(
        address, retry=Retry(wait_s=20.0), options=Options(service_config={})
    ) as client:
        asking = asyncio.ensure_future(kind.run(client.chat("hi").answer))
        # Without gRPC's own retries, the first attempt fails in milliseconds.
        done, _ = await asyncio.wait({asking}, timeout=0.5)
        assert not done
        async with serving(Scripted([text("A")]), address):
            assert (await asking).text == "A"


@both
async def test_a_server_that_never_comes_ends_the_wait(kind: Kind) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with kind.connect(address, retry=Retry(wait_s=0.1)) as client:
            failed = await kind.failure(client.chat("hi").answer)
            assert type(failed) is UnavailableError
            assert (failed.reason, failed.retryable) == ("SERVER_NOT_REACHED", True)
            assert failed.message.startswith("no server was reached (")
            assert isinstance(failed.__cause__, grpc.RpcError)


# ---- broken in the middle


@both
@pytest.mark.parametrize(
    ("part", "kind_of_error", "reason"),
    [
        (broken(), UnavailableError, "CONNECTION_LOST"),
        (fail(WorkerLost("lost", retry_delay_s=0.0)), UnavailableError, "WORKER_LOST"),
        (end, IncompleteAnswerError, ""),
    ],
    ids=["unavailable", "a worker lost", "end"],
)
async def test_a_begun_answer_that_may_not_go_on_is_handed_over(
    kind: Kind, part: Part, kind_of_error: type[MillstreamError], reason: str
) -> None:
    script = Scripted([text("A"), text("B"), part], [text("A")])
    async with serving(script) as address, kind.connect(address, retry=STAYS) as client:
        failed = await kind.failure(client.chat("hi").answer)
        assert type(failed) is kind_of_error
        assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, reason)
        assert failed.partial is not None
        assert (failed.partial.text, failed.partial.complete) == ("AB", False)
        assert failed.retryable
        assert script.streams == 1
        await until(lambda: script.open == 0)


@both
@pytest.mark.parametrize("part", [broken(), end], ids=["broken", "end"])
async def test_a_begun_answer_goes_on_in_its_message(kind: Kind, part: Part) -> None:
    script = Scripted([text("A"), part], [text("B"), text("C"), part], [text("D")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        asking = client.chat("hi", max_new_tokens=9, min_new_tokens=2)
        answer = await kind.run(asking.answer)
    assert (answer.text, answer.complete, answer.resumed_after) == ("ABCD", True, [1, 3])
    first, second, third = [asked.start for asked in script.asked]
    assert not first.continue_final_message
    for start, said, most, least in ((second, "A", 8, 1), (third, "ABC", 6, 0)):
        assert start.continue_final_message
        assert start.messages[:-1] == first.messages
        assert start.messages[-1].content[0].text == said
        sampling = start.options.sampling
        assert (sampling.max_new_tokens, sampling.min_new_tokens) == (most, least)


@both
async def test_the_loss_is_told_where_the_other_server_can_not_continue(kind: Kind) -> None:
    refusal = fail(UnsupportedFeature.of("start.continue_final_message", "not with this template"))
    script = Scripted([text("A"), broken()], [refusal])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        failed = await kind.failure(client.chat("hi").answer)
    assert failed.reason == "CONNECTION_LOST"
    assert failed.partial is not None
    assert failed.partial.text == "A"


# ---- time


@both
@pytest.mark.parametrize("parts", [[hang], [text("AB"), hang]], ids=["before", "amid"])
async def test_the_deadline_ends_the_call_here_and_there(kind: Kind, parts: list[Part]) -> None:
    script = Scripted(parts)
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        failed = await kind.failure(client.chat("hi", timeout_s=0.3).answer)
        assert type(failed) is DeadlineExceededError
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (failed.partial.text if failed.partial else "") == ("AB" if parts[1:] else "")
        assert script.streams == 1
        await until(lambda: script.open == 0)


@both
@pytest.mark.parametrize("parts", [[hang], [text("AB"), hang]], ids=["before", "amid"])
async def test_a_turns_time_is_the_turns_not_the_conversations(
    kind: Kind, parts: list[Part]
) -> None:
    script = Scripted([text("A")], parts, [text("C")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        conversation = client.conversation()
        await kind.run(conversation.say("one", timeout_s=30.0).answer)
        failed = await kind.failure(conversation.say("two", timeout_s=0.3).answer)
        assert type(failed) is DeadlineExceededError
        assert failed.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: script.open == 0)
        assert (await kind.run(conversation.say("three").answer)).text == "C"
        said = [user("one"), assistant("A"), user("three")]
        assert list(script.asked[-1].start.messages) == said
        assert script.streams == 2
        await kind.run(conversation.close)


# ---- conversations


@both
@pytest.mark.parametrize(
    "part",
    [broken(), fail(Overloaded("no room", retry_delay_s=0.0)), end],
    ids=["unavailable", "no room", "end"],
)
async def test_a_turn_that_failed_unanswered_goes_on_on_a_new_stream(
    kind: Kind, part: Part
) -> None:
    script = Scripted([text("A")], [part], [text("B")], [text("C")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        conversation = client.conversation(system="S", max_new_tokens=9)
        await kind.run(conversation.say("one").answer)
        answer = await kind.run(conversation.say("two", max_new_tokens=7).answer)
        assert (answer.text, script.streams) == ("B", 2)
        reopened = script.asked[2].start
        assert list(reopened.messages[1:]) == [user("one"), assistant("A"), user("two")]
        assert reopened.options.sampling.max_new_tokens == 7
        await kind.run(conversation.say("three").answer)
        assert script.asked[3].WhichOneof("message") == "user_turn"
        assert script.streams == 2
        await kind.run(conversation.close)
        await until(lambda: script.open == 0)


@both
async def test_a_turn_that_broke_amid_is_forgotten_with_its_options(kind: Kind) -> None:
    script = Scripted([text("A")], [text("B"), broken()], [text("C")])
    async with serving(script) as address, kind.connect(address, retry=QUICK) as client:
        conversation = client.conversation(max_new_tokens=9)
        await kind.run(conversation.say("one").answer)
        failed = await kind.failure(conversation.say("two", max_new_tokens=7).answer)
        assert type(failed) is UnavailableError
        assert failed.partial is not None
        assert failed.partial.text == "B"
        assert (await kind.run(conversation.say("three").answer)).text == "C"
        reopened = script.asked[-1].start
        assert list(reopened.messages) == [user("one"), assistant("A"), user("three")]
        assert reopened.options.sampling.max_new_tokens == 9
        assert conversation.messages == (*reopened.messages, assistant("C"))
        await kind.run(conversation.close)


async def test_a_closed_conversation_leaves_no_thread_behind() -> None:
    def talk(address: str) -> None:
        with SyncClient(address) as client:
            for leave in ("close", "abort"):
                conversation = client.conversation()
                conversation.say("one").answer()
                getattr(conversation, leave)()

    script = Scripted([text("A")], [text("A")])
    async with serving(script) as address:
        before = threading.active_count()
        await asyncio.to_thread(talk, address)
        await until(lambda: script.open == 0)
        # One is asyncio's own, for to_thread.
        await until(lambda: threading.active_count() <= before + 1)


# ---- a status that arrives while a message is written


async def _refused_stock(address: str) -> set[grpc.StatusCode]:
    codes = set()
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = processor_pb2_grpc.ProcessorServiceStub(channel)
        for _ in range(20):
            call = stub.Chat()
            await call._metadata_sent.wait()
            time.sleep(0.01)  # noqa: ASYNC251 - a busy loop: the status arrives and isn't seen
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.AioRpcError):
                await call.write(processor_pb2.ChatRequest())
            codes.add(await call.code())
    return codes


async def _refused_ours(address: str) -> set[grpc.StatusCode]:
    async with Client(address, retry=NO_RETRY) as client:
        return {(await Kind(Client).failure(client.chat("x").answer)).code for _ in range(20)}


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(
            _refused_stock,
            id="stock",
            marks=trap(
                "grpc issue 36066: grpc.aio's write overwrites the status with INTERNAL",
                AssertionError,
            ),
        ),
        pytest.param(_refused_ours, id="ours"),
    ],
)
async def test_a_server_that_refuses_before_it_reads_is_understood(
    refused: Callable[[str], Awaitable[set[grpc.StatusCode]]],
) -> None:
    class Refusing(FakeProcessor):
        def Chat(self, request_iterator: Any, context: Any) -> Any:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")

    # In threads of its own, so that it answers while the loop is busy.
    server = grpc.server(ThreadPoolExecutor(2))
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(Refusing(), server)  # type: ignore[arg-type]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert await refused(f"127.0.0.1:{port}") == {grpc.StatusCode.UNAUTHENTICATED}
    finally:
        server.stop(0).wait()


# ---- what every call carries


@both
async def test_the_api_key_goes_with_every_call(kind: Kind) -> None:
    script = Scripted([text("A")], [], [text("A")])
    async with serving(script) as address, kind.connect(address, api_key="k-1") as client:
        await kind.run(client.chat("hi").answer)
        assert script.metadata["authorization"] == "Bearer k-1"
        script.metadata = {}
        await kind.run(client.models)
        assert script.metadata["authorization"] == "Bearer k-1"
        script.metadata = {}
        conversation = client.conversation()
        await kind.run(conversation.say("hi").answer)
        assert script.metadata["authorization"] == "Bearer k-1"
        await kind.run(conversation.close)


@both
async def test_a_trace_goes_on_in_the_server(kind: Kind) -> None:
    script = Scripted([text("A")], [])
    span = trace.NonRecordingSpan(
        trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    )
    async with serving(script) as address, kind.connect(address) as client:
        with trace.use_span(span):
            await kind.run(client.chat("hi").answer)
        assert script.metadata["traceparent"] == f"00-{0xABC:032x}-{0xDEF:016x}-01"
        await kind.run(client.models)
        assert "traceparent" not in script.metadata
        assert "authorization" not in script.metadata
