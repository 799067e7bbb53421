"""The admin server: what operators can see and set in one process, on its own address."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, cast

import grpc
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1._async import ChannelzServicer
from grpc_health.v1 import health_pb2_grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc
from millstream_server.runtime.errors import Code, InvalidRequestError, StatusError
from millstream_server.runtime.rpc import health, reflection
from millstream_server.runtime.rpc.call import Call
from millstream_server.runtime.rpc.channel import server_options
from millstream_server.runtime.rpc.grpc_server import GrpcServer, RpcInterceptor
from millstream_server.runtime.rpc.serving import ServicerTable
from millstream_server.runtime.security.tls import ServerTls
from millstream_server.runtime.settings import describe
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

SERVICES = ("millstream.v1.AdminService", "grpc.channelz.v1.Channelz", health.SERVICE_NAME)
_MAX_RECEIVE_BYTES = 64 << 10  # requests are short; responses may be long
_LEVELS = {
    admin_pb2.LOG_LEVEL_INHERIT: logging.NOTSET,
    admin_pb2.LOG_LEVEL_DEBUG: logging.DEBUG,
    admin_pb2.LOG_LEVEL_INFO: logging.INFO,
    admin_pb2.LOG_LEVEL_WARNING: logging.WARNING,
    admin_pb2.LOG_LEVEL_ERROR: logging.ERROR,
    admin_pb2.LOG_LEVEL_CRITICAL: logging.CRITICAL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The process that is administered."""

    services: tuple[str, ...]
    """Full names of the services on its public address."""
    settings: Any
    """Its settings, a dataclass of `settings.setting` fields; secrets are masked in responses."""
    health: health.HealthServicer
    """The health servicer of its public address; the admin address serves the same one."""
    open_work: Callable[[], Mapping[str, int]]
    """Returns the amount of open work by kind."""


@dataclass(frozen=True, slots=True)
class AdminService:
    """A service on the admin address, besides those of every process."""

    name: str
    """Its full proto name."""
    add: Callable[[ServicerTable], None]
    """Adds its servicer."""
    max_receive_bytes: int = _MAX_RECEIVE_BYTES
    """Largest message of its callers."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves AdminService."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._start_time = datetime.now(UTC)
        self._started_s = time.monotonic()

    async def GetServerStatus(  # noqa: N802 - the proto's name
        self, request: admin_pb2.GetServerStatusRequest, call: Call
    ) -> admin_pb2.GetServerStatusResponse:
        subject = self._subject
        status = admin_pb2.ServerStatus(
            services=subject.services,
            millstream_version=version("millstream"),
            pid=os.getpid(),
            settings={
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in describe(subject.settings).items()
            },
            health=subject.health.states,
            open_work=subject.open_work(),
            health_conditions=subject.health.told.conditions,
        )
        status.start_time.FromDatetime(self._start_time)
        status.uptime.FromTimedelta(timedelta(seconds=time.monotonic() - self._started_s))
        return admin_pb2.GetServerStatusResponse(status=status)

    async def SetLogLevel(  # noqa: N802
        self, request: admin_pb2.SetLogLevelRequest, call: Call
    ) -> admin_pb2.SetLogLevelResponse:
        """Set one logger's level.

        Raises:
            InvalidRequestError: there is no such level or no such logger.
        """
        level = _LEVELS.get(request.level)
        if level is None:
            raise InvalidRequestError.of("level", "must be set to one of the named levels")
        if not request.logger and level == logging.NOTSET:
            raise InvalidRequestError.of("level", "the root logger has no parent to inherit from")
        # `getLogger` would create a logger with a misspelt name, which nothing uses.
        if request.logger and request.logger not in logging.Logger.manager.loggerDict:
            raise InvalidRequestError.of("logger", "this process has no logger of that name")
        target = logging.getLogger(request.logger)
        previous = _level_to_proto(target.level)
        target.setLevel(level)
        log.warning(
            "log level changed", of=target.name, to=_name(request.level), was=_name(previous)
        )
        return admin_pb2.SetLogLevelResponse(previous_level=previous)


def _level_to_proto(level: int) -> admin_pb2.LogLevel.ValueType:
    """Convert a level; a level between two named ones becomes the lower."""
    below = [named for named, number in _LEVELS.items() if 0 < number <= level]
    if level == logging.NOTSET:
        return admin_pb2.LOG_LEVEL_INHERIT
    return below[-1] if below else admin_pb2.LOG_LEVEL_DEBUG


def _name(level: admin_pb2.LogLevel.ValueType) -> str:
    return admin_pb2.LogLevel.Name(level).removeprefix("LOG_LEVEL_").lower()


class Channelz:
    """grpcio's channelz servicer, whose failures become a `StatusError`."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(ChannelzServicer, name)

        async def serve(request: Any, _call: Call) -> Any:
            status = _Status()
            response = await method(request, status)
            if status.code is not None:
                raise StatusError(Code(status.code.value[0]), status.details)
            return response

        return serve


class _Status:
    """The part of a servicer context that grpcio's channelz uses."""

    def __init__(self) -> None:
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details


class AdminServer:
    """AdminService, channelz, health and reflection on an address of their own.

    Stop it after the public server, so that operators can watch a drain.
    """

    def __init__(
        self,
        subject: Subject,
        interceptor: RpcInterceptor,
        tls: ServerTls | None = None,
        further: Sequence[AdminService] = (),
    ) -> None:
        """Serve ``subject`` and ``further`` services; in plaintext without ``tls``."""
        largest = max((s.max_receive_bytes for s in further), default=_MAX_RECEIVE_BYTES)
        self._tls = tls
        self.grpc = GrpcServer(interceptor, server_options(max_receive_bytes=largest))
        methods = cast("ServicerTable", self.grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(subject), methods)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(Channelz(), methods)
        health_pb2_grpc.add_HealthServicer_to_server(subject.health, methods)
        for service in further:
            service.add(methods)
        names = (*SERVICES, *(service.name for service in further))
        self._reflection = reflection.add_reflection(methods, names)

    async def listen(self, address: str) -> int:
        """Bind and start; returns the port.

        Raises:
            OSError: the address can't be bound.
        """
        port = self.grpc.bind(address, self._tls)
        await self.grpc.start()
        return port

    async def stop(self) -> None:
        """Stop at once. The public server's health ends its own Watches."""
        self._reflection.close()
        await self.grpc.stop(None)
