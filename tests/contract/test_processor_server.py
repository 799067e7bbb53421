"""The Processor as a server: workers that are away, health, reflection."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from millstream_server.control.engine import Role
from millstream_server.processor.app import SERVICES
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import ALPHABET, MODEL, processor, suite, worker
from millstream_testing.waiting import until
from tests.support.processor.chats import Conversation, chat, completion, options, start, user_turn
from tests.support.wire.failures import refusal

NOWHERE = "127.0.0.1:1"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- workers that are away


async def test_without_workers_requests_are_told_to_retry(text_model: TextModel) -> None:
    async with processor({MODEL: text_model}, [NOWHERE], wait=False) as front:
        conversation = Conversation(front.stub)
        await conversation.say(start("hi"))
        for call in (conversation.end(), front.stub.Complete(completion("A"))):
            failed = await refusal(call)
            assert failed.code is grpc.StatusCode.UNAVAILABLE
            assert failed.reason == "NO_WORKER"
            assert failed.retryable
            assert failed.retry_delay_s == 1
            assert "127.0.0.1" not in failed.message


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_half_of_a_disaggregated_pair_is_no_worker(text_model: TextModel, role: Role) -> None:
    async with (
        worker(replace(ALPHABET, role=role)) as one,
        processor({MODEL: text_model}, [one.address]) as front,
    ):
        failed = await refusal(front.stub.Complete(completion("A")))
        assert failed.code is grpc.StatusCode.UNAVAILABLE
        assert failed.reason == "NO_WORKER"
        missing = "decode" if role is Role.PREFILL else "prefill"
        assert missing in failed.message


async def test_workers_of_different_weights_are_said_by_health_and_by_the_error(
    text_model: TextModel,
) -> None:
    prefill = replace(ALPHABET, role=Role.PREFILL, weight_version="step-2")
    decode = replace(ALPHABET, role=Role.DECODE, weight_version="default")
    async with (
        worker(prefill) as one,
        worker(decode) as two,
        worker(replace(decode, weight_version="step-2")) as three,
    ):
        async with processor({MODEL: text_model}, [one.address, two.address], wait=False) as front:
            conditions = front.server.conditions
            await until(lambda: "weight versions differ" in conditions.holding)
            assert conditions.holding == ("no workers", "weight versions differ")
            failed = await refusal(front.stub.Complete(completion("A")))
            assert (failed.code, failed.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_WORKER")
            assert "different weight versions ('step-2' against 'default')" in failed.message
        addresses = [one.address, two.address, three.address]
        async with processor({MODEL: text_model}, addresses, wait=False) as front:
            await until(lambda: front.server.conditions.serving)


async def test_a_conversation_outlives_its_worker(text_model: TextModel) -> None:
    stepping = replace(ALPHABET, step_s=0.01)
    async with (
        worker(stepping) as one,
        worker(stepping) as two,
        processor({MODEL: text_model}, [one.address, two.address]) as front,
    ):
        conversation = Conversation(front.stub)
        await conversation.say(start("hi", opts=options(10)))
        await conversation.read()
        its_worker = one if (await one.engine.load()).running_requests else two
        await conversation.answer(1)
        await its_worker.server.stop(0)
        await until(lambda: sum(front.router.connected(MODEL).values()) == 1)
        await conversation.say(user_turn("more"))
        assert (await conversation.answer(2)).text == "ABCDEFGHIJ"


async def test_a_worker_that_is_still_loading_is_taken_once_it_is_ready(
    text_model: TextModel,
) -> None:
    async with (
        worker(loaded=False) as one,
        processor({MODEL: text_model}, [one.address], wait=False) as front,
    ):
        failed = await refusal(front.stub.Complete(completion("A")))
        assert failed.reason == "NO_WORKER"
        await one.load()
        await until(front.core.models.ready)
        assert (await chat(front.stub, "hi", opts=options(2))).text == "AB"


async def test_a_draining_worker_costs_no_request(text_model: TextModel) -> None:
    async with (
        worker() as one,
        worker() as two,
        processor({MODEL: text_model}, [one.address, two.address]) as front,
    ):
        draining = asyncio.ensure_future(one.host.drain(0.5, 5))
        while not draining.done():
            answers = await asyncio.gather(
                *(chat(front.stub, "hi", opts=options(2)) for _ in range(8))
            )
            assert [answer.text for answer in answers] == ["AB"] * 8
        assert (await chat(front.stub, "hi", opts=options(2))).text == "AB"


# ---- health


async def test_health_follows_the_workers(text_model: TextModel) -> None:
    async with (
        worker(loaded=False) as one,
        processor({MODEL: text_model}, [one.address], wait=False) as front,
    ):
        health: Any = health_pb2_grpc.HealthStub(front.channel)

        async def status(name: str) -> int:
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name))
            return int(answer.status)

        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == NOT_SERVING
        assert await status("") == NOT_SERVING
        assert await status("millstream.v1.ProcessorService") == NOT_SERVING
        assert await status("liveness") == SERVING
        await one.load()
        while (await watch.read()).status != SERVING:
            pass
        assert await status("") == SERVING
        assert await status("millstream.v1.ProcessorService") == SERVING
        await one.server.stop(0)
        while (await watch.read()).status != NOT_SERVING:
            pass
        assert await status("liveness") == SERVING
        watch.cancel()
        failed = await refusal(health.Check(health_pb2.HealthCheckRequest(service="who")))
        assert failed.code is grpc.StatusCode.NOT_FOUND


# ---- reflection


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_and_resolves(text_model: TextModel, version: str) -> None:
    async with suite(text_model) as (front, one):
        own = set(SERVICES)
        assert await _services(front.channel, version) == own | _COMMON
        own = {"millstream.v1.DecodeService", "millstream.v1.WorkerService"}
        assert await _services(one.channel, version) == own | _COMMON
        for symbol in (
            "millstream.v1.ProcessorService",
            "millstream.v1.ChatRequest",
            "millstream.v1.ErrorReason",
            "google.rpc.ErrorInfo",
            "google.rpc.BadRequest",
            "google.rpc.RetryInfo",
        ):
            names = await _files(front.channel, version, symbol)
            assert symbol.removeprefix("millstream.v1.").removeprefix("google.rpc.") in names


_COMMON = {
    "xds.service.orca.v3.OpenRcaService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
}


async def _ask(channel: Any, version: str, **question: str) -> Any:
    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(**question))
    await call.done_writing()
    return await call.read()


async def _services(channel: Any, version: str) -> set[str]:
    answer = await _ask(channel, version, list_services="")
    return {service.name for service in answer.list_services_response.service}


async def _files(channel: Any, version: str, symbol: str) -> set[str]:
    """Name the services, messages and enums of the file that has this symbol."""
    answer = await _ask(channel, version, file_containing_symbol=symbol)
    assert not answer.HasField("error_response"), answer.error_response
    found = answer.file_descriptor_response.file_descriptor_proto
    files: list[Any] = [FileDescriptorProto.FromString(file) for file in found]
    return {
        entry.name
        for file in files
        for entry in (*file.service, *file.message_type, *file.enum_type)
    }
