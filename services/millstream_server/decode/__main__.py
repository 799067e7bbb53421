"""`python -m millstream_server.decode`: settings → engine → serve."""

from __future__ import annotations

from millstream.v1 import decode_pb2_grpc
from millstream_server.decode.servicer import DecodeServicer
from millstream_server.decode.settings import DecodeMode, DecodeSettings
from millstream_server.engines.base import Role
from millstream_server.runtime.main import main
from millstream_server.runtime.server import Server
from millstream_server.worker.app import run
from millstream_server.worker.core import WorkerCore


def _add(core: WorkerCore, server: Server) -> None:
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(core), server.grpc)


def _role(settings: DecodeSettings) -> Role:
    return Role.AGGREGATED if settings.mode is DecodeMode.AGGREGATED else Role.DECODE


if __name__ == "__main__":
    main(
        DecodeSettings,
        lambda settings: run(settings, _role(settings), "millstream.v1.DecodeService", _add),
        prog="millstream-decode",
        description="Streams tokens: the decode worker of Millstream.",
    )
