"""Sockets of the HTTP/2 transport: which addresses, who is let in, who has to leave."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream_server.runtime.transport.sockets import listen_on
from millstream_testing.waiting import until
from tests.support.telemetry.logged import fields_of
from tests.support.wire.listening import (
    OPTIONS,
    PREFACE,
    closes,
    exchange,
    get,
    listening,
    parsed,
    serving_health,
)


async def test_above_the_bound_an_unused_connection_goes_and_the_used_stay(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening(replace(OPTIONS, max_connections=3)) as server:
        used = []
        for _ in range(2):
            used.append(await server.connect())
            used[-1][1].write(PREFACE)
        await until(lambda: len(server.made) == 2)
        unused = await server.connect()
        used.append(await server.connect())
        used[-1][1].write(PREFACE)
        await closes(unused)
        await until(lambda: len(server.made) == 3)
        for _ in range(2):
            await closes(await server.connect())
        for reader, writer in used:
            writer.write(b"x")
            assert await reader.readexactly(len(PREFACE) + 1) == PREFACE + b"x"
        server.made[0].place.mark_unused()
        assert parsed(await exchange(await server.connect(), get("/livez")))[0] == 200
        await closes(used[0])
        for _, writer in used[1:]:
            writer.close()
    (warned,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert fields_of(warned) == {"by": "ipv4:127.0.0.1", "open": 3}


async def test_an_address_takes_no_more_than_its_part() -> None:
    async with listening(replace(OPTIONS, max_connections_per_address=1)) as server:
        first = await server.connect()
        first[1].write(PREFACE)
        await until(lambda: len(server.made) == 1)
        await closes(await server.connect())
        other = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
        assert parsed(await exchange(other, get("/livez")))[0] == 200
        first[1].close()


async def test_running_out_of_files_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 2
    failures += [OSError(errno.ECONNABORTED, "gone")]
    accept = socket.socket.accept

    def failing(listens: socket.socket) -> Any:
        if failures:
            raise failures.pop(0)
        return accept(listens)

    async with listening() as server:
        monkeypatch.setattr(socket.socket, "accept", failing)
        assert parsed(await exchange(await server.connect(), get("/livez")))[0] == 200
    assert not failures
    (said,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "raise the limit of open files" in said.message


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
async def test_all_addresses_are_ipv4_and_ipv6(address: str) -> None:
    async with listening(on=address) as server:
        for host in ("127.0.0.1", "::1"):
            connection = await asyncio.open_connection(host, server.port)
            assert parsed(await exchange(connection, get("/livez")))[0] == 200


async def test_all_addresses_of_a_name_have_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    look_up = socket.getaddrinfo

    def both(host: str, *rest: Any, **more: Any) -> Any:
        hosts = ("127.0.0.1", "::1") if host == "localhost" else (host,)
        return [found for each in hosts for found in look_up(each, *rest, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    async with listening(on="localhost:0") as server:
        for host in ("127.0.0.1", "::1"):
            connection = await asyncio.open_connection(host, server.port)
            assert parsed(await exchange(connection, get("/livez")))[0] == 200
        for taken in (f"127.0.0.1:{server.port}", f"[::1]:{server.port}", f"0.0.0.0:{server.port}"):
            with pytest.raises(OSError, match="is the port taken"):
                listen_on(taken, backlog=1)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("127.0.0.1", "it is not HOST:PORT"),
        ("::1:5", "it is not HOST:PORT"),
        ("192.0.2.1:5", "Cannot assign requested address"),
        ("unix:/no/such/folder/socket", "No such file or directory"),
    ],
)
def test_an_address_that_cant_be_bound_is_explained(address: str, says: str) -> None:
    with pytest.raises(OSError, match=f"can't listen on {re.escape(address)}: .*{says}"):
        listen_on(address, backlog=1)


async def test_a_unix_socket_is_its_owners_and_replaces_only_a_dead_one(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    address = f"unix:{path}"
    async with listening(on=address):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(OSError, match="is the port taken"):
            listen_on(address, backlog=1)
        connection = await asyncio.open_unix_connection(path)
        assert parsed(await exchange(connection, get("/livez")))[0] == 200
    assert not path.exists()
    listen_on(address, backlog=1).sockets[0].close()  # as a process that was killed leaves it
    again = listen_on(address, backlog=1)
    again.close()
    path.write_text("a file")
    with pytest.raises(OSError, match="that is no socket"):
        listen_on(address, backlog=1)
    assert path.read_text() == "a file"


@pytest.mark.parametrize("on", ["[::1]:0", "0.0.0.0:0", "unix:{folder}/socket"])
async def test_grpcs_client_finds_each_kind_of_address(on: str, tmp_path: Path) -> None:
    address = on.format(folder=tmp_path)
    async with serving_health(address) as port:
        target = address.replace(":0", f":{port}").replace("0.0.0.0", "127.0.0.1")  # noqa: S104
        async with grpc.aio.insecure_channel(target) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(service="liveness"), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
