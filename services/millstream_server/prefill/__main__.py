"""`python -m millstream_server.prefill`: settings → engine → serve."""

from __future__ import annotations

from millstream.v1 import prefill_pb2_grpc
from millstream_server.engines.base import Role
from millstream_server.prefill.servicer import PrefillServicer
from millstream_server.runtime.main import main
from millstream_server.runtime.server import Server
from millstream_server.worker.app import run
from millstream_server.worker.core import WorkerCore
from millstream_server.worker.settings import WorkerSettings


def _add(core: WorkerCore, server: Server) -> None:
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillServicer(core), server.grpc)


if __name__ == "__main__":
    main(
        WorkerSettings,
        lambda settings: run(settings, Role.PREFILL, "millstream.v1.PrefillService", _add),
        prog="millstream-prefill",
        description="Turns prompts into KV cache: the prefill worker of Millstream.",
    )
