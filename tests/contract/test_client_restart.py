"""Processors restart one after the other under load: no request fails."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from millstream.v1 import processor_pb2_grpc
from millstream_client import Options, Tls, UnavailableError
from millstream_client.service_config import RECOMMENDED, to_json
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.runtime.rpc.health import ACCEPTING
from millstream_testing.fake_processor import FakeProcessor
from millstream_testing.in_process import (
    ALPHABET,
    MODEL,
    InProcessProcessor,
    processor,
    worker,
)
from millstream_testing.waiting import until
from tests.support.clients.clients import KINDS, Kind
from tests.support.processor.chats import chat, options
from tests.support.wire.certificates import Authority

both = pytest.mark.parametrize("kind", KINDS)
STEPPING = replace(ALPHABET, step_s=0.005, max_running_requests=64)
ASKERS = 8


@contextlib.asynccontextmanager
async def two_processors(
    text_model: TextModel,
) -> AsyncIterator[tuple[InProcessProcessor, InProcessProcessor]]:
    models = {MODEL: text_model}
    async with (
        worker(STEPPING) as one,
        processor(models, [one.address]) as first,
        processor(models, [one.address]) as second,
    ):
        yield first, second


async def _leave(front: InProcessProcessor) -> None:
    """What a Processor does on SIGTERM."""
    front.server.begin_drain()
    await front.core.work.drain(0.3, 10.0)
    await front.server.stop(0.2)


@contextlib.asynccontextmanager
async def asking(ask: Callable[[], Awaitable[Any]]) -> AsyncIterator[list[Any]]:
    """Ask again and again while the body runs; yields the answers, failures among them."""
    answers: list[Any] = []
    leaving = asyncio.Event()

    async def asker() -> None:
        while not leaving.is_set():
            answers.extend(await asyncio.gather(ask(), return_exceptions=True))

    askers = [asyncio.ensure_future(asker()) for _ in range(ASKERS)]
    try:
        yield answers
    finally:
        leaving.set()
        await asyncio.gather(*askers)


async def test_with_the_recommended_config_any_grpc_client_survives_a_processors_shutdown(
    text_model: TextModel,
) -> None:
    """Plain stubs: what the config does in another language, without this library."""
    async with two_processors(text_model) as (first, second):
        channel = grpc.aio.insecure_channel(
            f"ipv4:{first.address},{second.address}",
            options=[("grpc.service_config", to_json(RECOMMENDED))],
        )
        async with channel:
            stub = processor_pb2_grpc.ProcessorServiceStub(channel)

            async def ask() -> str:
                return (await chat(stub, "hi", opts=options(10))).text

            async with asking(ask) as answers:
                await until(lambda: first.core.work.count > 0 and second.core.work.count > 0)
                await _leave(first)
                after = len(answers)
                await until(lambda: len(answers) > after + 2 * ASKERS)
                await until(lambda: second.core.work.count > 0)
        assert set(answers) == {"ABCDEFGHIJ"}


@both
async def test_a_processor_that_shuts_down_fails_no_request(
    text_model: TextModel, kind: Kind
) -> None:
    async with (
        two_processors(text_model) as (first, second),
        kind.connect(f"{first.address},{second.address}") as client,
    ):

        async def ask() -> str:
            return str((await kind.run(client.chat("hi", max_new_tokens=10).answer)).text)

        async with asking(ask) as answers:
            await until(lambda: first.core.work.count > 0 and second.core.work.count > 0)
            await _leave(first)
            after = len(answers)
            await until(lambda: len(answers) > after + 2 * ASKERS)
        assert set(answers) == {"ABCDEFGHIJ"}


@both
async def test_a_processor_that_accepts_nothing_gets_nothing_new(
    text_model: TextModel, kind: Kind
) -> None:
    async with (
        two_processors(text_model) as (first, second),
        kind.connect(f"{first.address},{second.address}") as client,
    ):
        served = {first.port: 0, second.port: 0}
        for front in (first, second):
            track = front.core.work.begin

            def begin(
                on_leaving: Callable[[], None] | None = None,
                port: int = front.port,
                track: Callable[..., None] = track,
            ) -> None:
                served[port] += 1
                track(on_leaving)

            front.core.work.begin = begin  # type: ignore[method-assign]

        async def ask() -> None:
            await kind.run(client.chat("hi", max_new_tokens=1).answer)

        async def both_asked() -> bool:
            await ask()
            return all(served.values())

        await until(both_asked)
        first.server.health.set(ACCEPTING, serving=False)

        async def noticed() -> bool:
            before = served[first.port]
            for _ in range(4):
                await ask()
            return served[first.port] == before

        await until(noticed)
        first.server.health.set(ACCEPTING, serving=True)
        await until(both_asked)


@both
async def test_the_only_server_may_restart(kind: Kind) -> None:
    """At its own address: until it is back, requests wait."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"

    async def serve() -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        processor_pb2_grpc.add_ProcessorServiceServicer_to_server(FakeProcessor(), server)
        server.add_insecure_port(address)
        await server.start()
        return server

    server = await serve()
    async with kind.connect(address) as client:

        async def ask() -> str:
            return str((await kind.run(client.chat("hi").answer)).text)

        async with asking(ask) as answers:
            for restart in range(1, 4):
                await until(functools.partial(_more_than, answers, 20 * restart))
                await server.stop(5)
                server = await serve()
        await server.stop(5)
    assert set(answers) == {"You said: hi"}


def _more_than(answers: list[Any], count: int) -> bool:
    return len(answers) > count


# ---- TLS


@both
async def test_mutual_tls(kind: Kind, tmp_path: Path) -> None:
    authority, other_ca = Authority(), Authority()
    server_pair, client_pair = authority.issue("processor.test"), authority.issue("client.test")
    for name, data in {
        "ca.crt": authority.pem,
        "other.crt": other_ca.pem,
        "tls.crt": client_pair.cert,
        "tls.key": client_pair.key,
    }.items():
        (tmp_path / name).write_bytes(data)
    server = grpc.aio.server()
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(FakeProcessor(), server)
    port = server.add_secure_port(
        "127.0.0.1:0",
        grpc.ssl_server_credentials(
            [(server_pair.key, server_pair.cert)], authority.pem, require_client_auth=True
        ),
    )
    await server.start()
    tls = Tls(
        ca_file=tmp_path / "ca.crt",
        cert_file=tmp_path / "tls.crt",
        key_file=tmp_path / "tls.key",
        server_name="processor.test",
    )
    try:
        async with kind.connect(f"127.0.0.1:{port}", tls=tls, api_key="k") as client:
            assert (await kind.run(client.chat("hi").answer)).text == "You said: hi"
        for wrong in (
            replace(tls, ca_file=tmp_path / "other.crt"),
            replace(tls, cert_file=None, key_file=None),
            replace(tls, server_name="other.test"),
        ):
            at_once = Options(service_config={})
            async with kind.connect(f"127.0.0.1:{port}", tls=wrong, options=at_once) as client:
                assert await kind.run(client.health, timeout_s=2.0) is False
                failed = await kind.failure(client.models, timeout_s=1.0)
                assert isinstance(failed, UnavailableError)
                assert failed.code is grpc.StatusCode.UNAVAILABLE
    finally:
        await server.stop(0)
