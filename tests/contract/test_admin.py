"""The admin address: what operators can see and set there, and nowhere else."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from millstream.v1 import admin_pb2, admin_pb2_grpc
from millstream_server.runtime.lifecycle.admin import SERVICES, AdminServer, Subject
from millstream_server.runtime.rpc.grpc_server import RpcInterceptor
from millstream_server.runtime.rpc.health import HealthServicer
from millstream_server.runtime.rpc.reflection import V1, V1ALPHA, add_reflection
from millstream_server.runtime.security.tls import ServerTls, TlsFiles
from millstream_server.runtime.settings import setting
from tests.support.telemetry.logged import fields_of
from tests.support.wire.failures import refusal

PUBLIC = "millstream.v1.DecodeService"
LOGGER = "millstream_server.runtime"
LEVELS = (
    (admin_pb2.LOG_LEVEL_DEBUG, logging.DEBUG),
    (admin_pb2.LOG_LEVEL_INFO, logging.INFO),
    (admin_pb2.LOG_LEVEL_WARNING, logging.WARNING),
    (admin_pb2.LOG_LEVEL_ERROR, logging.ERROR),
    (admin_pb2.LOG_LEVEL_CRITICAL, logging.CRITICAL),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    listen: str = setting("127.0.0.1:0", help="address")
    drain_s: float = setting(30.0, help="time")
    allowed_peers: tuple[str, ...] = setting(("a", "b"), help="names")
    ticket_key: str = setting("", help="key", secret=True)


class Running:
    """An admin server beside a public one, as a service has them."""

    def __init__(self, admin: AdminServer, health: HealthServicer, channel: Any) -> None:
        self.server = admin
        self.health = health
        self.channel = channel
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        self.channelz = channelz_pb2_grpc.ChannelzStub(channel)


@contextlib.asynccontextmanager
async def running(work: dict[str, int] | None = None) -> AsyncIterator[Running]:
    health = HealthServicer((PUBLIC,), lambda: ("loading", "paused"))
    subject = Subject(
        services=(PUBLIC,),
        settings=Settings(ticket_key="5ec2e7"),
        health=health,
        open_work=lambda: work or {},
    )
    server = AdminServer(subject, RpcInterceptor())
    port = await server.listen("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield Running(server, health, channel)
        finally:
            await server.stop()


@contextlib.contextmanager
def levels_kept(*names: str) -> Iterator[None]:
    before = {name: logging.getLogger(name).level for name in names}
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


# ---- status


async def test_the_status_says_what_the_process_is_and_does() -> None:
    work = {"requests": 3}
    async with running(work) as r:
        r.health.set(PUBLIC, serving=True)
        status = (await r.admin.GetServerStatus(admin_pb2.GetServerStatusRequest())).status
        assert list(status.services) == [PUBLIC]
        assert status.millstream_version
        assert status.pid == os.getpid()
        assert abs(status.start_time.ToNanoseconds() / 1e9 - time.time()) < 5
        assert 0 < status.uptime.ToNanoseconds() / 1e9 < 5
        assert dict(status.health) == {"": False, PUBLIC: True, "liveness": True, "accepting": True}
        assert list(status.health_conditions) == ["loading", "paused"]
        assert dict(status.open_work) == {"requests": 3}
        work["requests"] = 2
        later = (await r.admin.GetServerStatus(admin_pb2.GetServerStatusRequest())).status
        assert dict(later.open_work) == {"requests": 2}
        assert later.start_time == status.start_time
        assert later.uptime.ToNanoseconds() > status.uptime.ToNanoseconds()


async def test_settings_are_told_and_secrets_are_not() -> None:
    async with running() as r:
        answer = await r.admin.GetServerStatus(admin_pb2.GetServerStatusRequest())
        settings = dict(answer.status.settings)
        assert settings.pop("ticket_key") == "***"
        assert settings.pop("listen") == "127.0.0.1:0"
        assert {name: json.loads(value) for name, value in settings.items()} == {
            "drain_s": 30.0,
            "allowed_peers": ["a", "b"],
        }
        assert b"5ec2e7" not in answer.SerializeToString()


# ---- log levels


@pytest.mark.parametrize(("level", "number"), LEVELS)
async def test_a_level_is_set_and_can_be_set_back(
    level: admin_pb2.LogLevel.ValueType, number: int
) -> None:
    async with running() as r:
        with levels_kept(LOGGER):
            logging.getLogger(LOGGER).setLevel(logging.NOTSET)
            answer = await r.admin.SetLogLevel(
                admin_pb2.SetLogLevelRequest(logger=LOGGER, level=level)
            )
            assert answer.previous_level == admin_pb2.LOG_LEVEL_INHERIT
            assert logging.getLogger(LOGGER).level == number
            back = await r.admin.SetLogLevel(
                admin_pb2.SetLogLevelRequest(logger=LOGGER, level=answer.previous_level)
            )
            assert back.previous_level == level
            assert logging.getLogger(LOGGER).level == logging.NOTSET


@pytest.mark.parametrize(
    ("number", "told"),
    [(5, admin_pb2.LOG_LEVEL_DEBUG), (25, admin_pb2.LOG_LEVEL_INFO), (90, LEVELS[-1][0])],
)
async def test_a_level_between_two_is_told_as_the_lower_one(
    number: int, told: admin_pb2.LogLevel.ValueType
) -> None:
    async with running() as r:
        with levels_kept(LOGGER):
            logging.getLogger(LOGGER).setLevel(number)
            answer = await r.admin.SetLogLevel(
                admin_pb2.SetLogLevelRequest(logger=LOGGER, level=admin_pb2.LOG_LEVEL_INHERIT)
            )
            assert answer.previous_level == told


async def test_the_root_loggers_level_counts_for_all_and_the_change_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as r:
        with levels_kept("", LOGGER):
            logging.getLogger().setLevel(logging.WARNING)
            answer = await r.admin.SetLogLevel(
                admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_DEBUG)
            )
            assert answer.previous_level == admin_pb2.LOG_LEVEL_WARNING
            assert logging.getLogger(LOGGER).isEnabledFor(logging.DEBUG)
    (line,) = [r for r in caplog.records if r.message == "log level changed"]
    assert fields_of(line) == {"of": "root", "to": "debug", "was": "warning"}


UNNAMED: Any = 99


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        pytest.param(admin_pb2.SetLogLevelRequest(logger=LOGGER), "level", id="not set"),
        pytest.param(
            admin_pb2.SetLogLevelRequest(logger=LOGGER, level=UNNAMED),
            "level",
            id="from the future",
        ),
        pytest.param(
            admin_pb2.SetLogLevelRequest(level=admin_pb2.LOG_LEVEL_INHERIT), "level", id="root"
        ),
        pytest.param(
            admin_pb2.SetLogLevelRequest(logger="milstream", level=LEVELS[0][0]),
            "logger",
            id="misspelt",
        ),
    ],
)
async def test_what_makes_no_sense_is_refused(request_: Any, field: str) -> None:
    async with running() as r:
        with levels_kept("", LOGGER):
            before = logging.getLogger().level, logging.getLogger(LOGGER).level
            failed = await refusal(r.admin.SetLogLevel(request_))
            assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
            assert (failed.reason, failed.fields) == ("INVALID_REQUEST", (field,))
            assert not failed.retryable
            assert (logging.getLogger().level, logging.getLogger(LOGGER).level) == before
    assert "milstream" not in logging.Logger.manager.loggerDict


# ---- what else is there


async def test_channelz_lists_servers_and_their_sockets() -> None:
    async with running() as r:
        listed = await r.channelz.GetServers(channelz_pb2.GetServersRequest())
        seen = []
        for server in listed.server:
            ask = channelz_pb2.GetServerSocketsRequest(server_id=server.ref.server_id)
            for ref in (await r.channelz.GetServerSockets(ask)).socket_ref:
                found = await r.channelz.GetSocket(
                    channelz_pb2.GetSocketRequest(socket_id=ref.socket_id)
                )
                seen.append(found.socket)
        assert any(socket.data.streams_started > 0 for socket in seen)
        channels = await r.channelz.GetTopChannels(channelz_pb2.GetTopChannelsRequest())
        assert len(channels.channel) >= 1
        failed = await refusal(
            r.channelz.GetServer(channelz_pb2.GetServerRequest(server_id=1 << 40))
        )
        assert failed.code is grpc.StatusCode.NOT_FOUND


async def test_health_is_that_of_the_process() -> None:
    async with running() as r:
        stub = health_pb2_grpc.HealthStub(r.channel)
        ask = health_pb2.HealthCheckRequest(service=PUBLIC)
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        r.health.set(serving=True)
        assert (await stub.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING


async def _reflected(channel: Any) -> set[str]:
    method: Any = channel.stream_stream(
        f"/{V1}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    stream = method()
    await stream.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    answer = await stream.read()
    stream.cancel()
    return {service.name for service in answer.list_services_response.service}


async def test_reflection_lists_the_admin_services() -> None:
    async with running() as r:
        assert await _reflected(r.channel) == {*SERVICES, V1, V1ALPHA}


async def test_nothing_of_it_is_on_a_public_address() -> None:
    health = HealthServicer((PUBLIC,))
    public = grpc.aio.server(interceptors=[RpcInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(health, public)
    add_reflection(public, ["grpc.health.v1.Health"])
    port = public.add_insecure_port("127.0.0.1:0")
    await public.start()
    async with running(), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        channelz = channelz_pb2_grpc.ChannelzStub(channel)
        for call in (
            admin.GetServerStatus(admin_pb2.GetServerStatusRequest()),
            admin.SetLogLevel(admin_pb2.SetLogLevelRequest()),
            channelz.GetServers(channelz_pb2.GetServersRequest()),
        ):
            assert (await refusal(call)).code is grpc.StatusCode.UNIMPLEMENTED
        assert await _reflected(channel) == {"grpc.health.v1.Health", V1, V1ALPHA}
    await public.stop(None)


# ---- the address


async def test_a_taken_address_is_said_to_be_taken() -> None:
    subject = Subject(services=(), settings=Settings(), health=HealthServicer(()), open_work=dict)
    first, second = (AdminServer(subject, RpcInterceptor()) for _ in range(2))
    port = await first.listen("127.0.0.1:0")
    with pytest.raises(OSError, match="is the port taken"):
        await second.listen(f"127.0.0.1:{port}")
    await first.stop()
    await second.stop()


async def test_over_tls_a_client_without_a_certificate_is_kept_out(tmp_path: Path) -> None:
    ca = trustme.CA()
    server_cert, client_cert = ca.issue_cert("localhost"), ca.issue_cert("operator")
    root = ca.cert_pem.bytes()

    def pair(cert: trustme.LeafCert) -> tuple[bytes, bytes]:
        return cert.private_key_pem.bytes(), b"".join(p.bytes() for p in cert.cert_chain_pems)

    files = TlsFiles(tmp_path / "crt", tmp_path / "key", tmp_path / "ca")
    for path, content in ((files.key, pair(server_cert)[0]), (files.cert, pair(server_cert)[1])):
        path.write_bytes(content)
    (tmp_path / "ca").write_bytes(root)
    subject = Subject(services=(), settings=Settings(), health=HealthServicer(()), open_work=dict)
    server = AdminServer(subject, RpcInterceptor(), ServerTls(files))
    target = f"localhost:{await server.listen('127.0.0.1:0')}"
    key, chain = pair(client_cert)
    known = grpc.ssl_channel_credentials(root, key, chain)
    for channel_credentials, answered in (
        (known, True),
        (grpc.ssl_channel_credentials(root), False),
    ):
        async with grpc.aio.secure_channel(target, channel_credentials) as channel:
            admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
            call = admin.GetServerStatus(admin_pb2.GetServerStatusRequest())
            if answered:
                assert (await call).status.pid == os.getpid()
            else:
                assert (await refusal(call)).code is grpc.StatusCode.UNAVAILABLE
    await server.stop()
