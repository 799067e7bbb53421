"""The admin port: what operators see and set in one process, apart from where callers come in."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any

import grpc
from grpc_channelz.v1 import channelz_pb2_grpc
from grpc_channelz.v1._async import ChannelzServicer
from grpc_health.v1 import health_pb2_grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc
from millstream_server.runtime import health, reflection
from millstream_server.runtime.channel import bind, server_options
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.rpc_interceptor import RpcInterceptor
from millstream_server.runtime.settings import describe

logger = logging.getLogger(__name__)

SERVICES = ("millstream.v1.AdminService", "grpc.channelz.v1.Channelz", health.SERVICE_NAME)
_MAX_RECEIVE_BYTES = 64 << 10  # no admin request is long; answers may be
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
    """Its settings, a dataclass of `settings.setting` fields: secrets are masked by it."""
    health: health.HealthServicer
    """The one of its public address: the admin address answers the same."""
    open_work: Callable[[], Mapping[str, int]]
    """Counts the work that is open, by kind."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Answers from the process itself."""

    def __init__(self, subject: Subject) -> None:
        """Describe ``subject``, from now on."""
        self._subject = subject
        self._start_time = datetime.now(UTC)
        self._started_s = time.monotonic()

    async def GetServerStatus(  # noqa: N802 - the proto's name
        self, request: admin_pb2.GetServerStatusRequest, context: Any
    ) -> admin_pb2.GetServerStatusResponse:
        """Describe the process."""
        subject = self._subject
        status = admin_pb2.ServerStatus(
            services=subject.services,
            millstream_version=version("millstream"),
            pid=os.getpid(),
            settings={name: _text(v) for name, v in describe(subject.settings).items()},
            health=subject.health.states,
            open_work=subject.open_work(),
        )
        status.start_time.FromDatetime(self._start_time)
        status.uptime.FromTimedelta(timedelta(seconds=time.monotonic() - self._started_s))
        return admin_pb2.GetServerStatusResponse(status=status)

    async def SetLogLevel(  # noqa: N802
        self, request: admin_pb2.SetLogLevelRequest, context: Any
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
        # Made here, a misspelt logger would take the level and nobody would ever log to it.
        if request.logger and request.logger not in logging.Logger.manager.loggerDict:
            raise InvalidRequestError.of("logger", "this process has no logger of that name")
        target = logging.getLogger(request.logger)
        previous = _level_to_proto(target.level)
        target.setLevel(level)
        logger.warning(
            "changed=%s level=%s was=%s", target.name, _name(request.level), _name(previous)
        )
        return admin_pb2.SetLogLevelResponse(previous_level=previous)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _level_to_proto(level: int) -> admin_pb2.LogLevel.ValueType:
    """Tell a level between two as the lower one."""
    below = [named for named, number in _LEVELS.items() if 0 < number <= level]
    if level == logging.NOTSET:
        return admin_pb2.LOG_LEVEL_INHERIT
    return below[-1] if below else admin_pb2.LOG_LEVEL_DEBUG


def _name(level: admin_pb2.LogLevel.ValueType) -> str:
    return admin_pb2.LogLevel.Name(level).removeprefix("LOG_LEVEL_").lower()


class AdminServer:
    """AdminService, channelz, health and reflection on an address of their own.

    It should outlive the public server: a drain is when operators look.
    """

    def __init__(
        self,
        subject: Subject,
        interceptor: RpcInterceptor,
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        """Serve ``subject``; without ``credentials`` in plaintext."""
        self._credentials = credentials
        self.grpc = grpc.aio.server(
            interceptors=[interceptor],
            options=server_options(max_receive_bytes=_MAX_RECEIVE_BYTES),
        )
        admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(subject), self.grpc)
        channelz_pb2_grpc.add_ChannelzServicer_to_server(ChannelzServicer(), self.grpc)
        health_pb2_grpc.add_HealthServicer_to_server(subject.health, self.grpc)
        self._reflection = reflection.add_reflection(self.grpc, SERVICES)

    async def listen(self, address: str) -> int:
        """Bind and start; answers the port.

        Raises:
            OSError: the address can't be bound.
        """
        port = bind(self.grpc, address, self._credentials)
        await self.grpc.start()
        return port

    async def stop(self) -> None:
        """Stop at once. The public server's health ends its own Watches."""
        self._reflection.close()
        await self.grpc.stop(None)
