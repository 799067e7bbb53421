"""A worker process from start to exit: listen, load, warm up, serve, drain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from millstream.v1 import worker_pb2_grpc
from millstream_server.engines.base import Engine, Role
from millstream_server.runtime.errors import ServingError
from millstream_server.runtime.log import phase
from millstream_server.runtime.server import Server, ServerOptions, until_signal
from millstream_server.runtime.settings import SettingsError
from millstream_server.transfer.ticket import TicketGate, TicketKey
from millstream_server.worker.core import WorkerCore
from millstream_server.worker.engine_choice import make_engine
from millstream_server.worker.info import WorkerInfoServicer
from millstream_server.worker.settings import WorkerSettings

logger = logging.getLogger(__name__)

# A start message with the longest prompt we know of (2 M tokens, 5 bytes each) fits; what is longer
# than the model's context is refused as that request's own error, not the stream's.
_OPTIONS = ServerOptions(max_receive_bytes=32 << 20)


async def run(
    settings: WorkerSettings,
    role: Role,
    service: str,
    add_service: Callable[[WorkerCore, Server], None],
) -> int:
    """Run a worker of ``role`` that serves ``service``; answers the process's exit code.

    The port is open from the start, NOT_SERVING until the model is loaded and warm.
    """
    engine = make_engine(settings, role)
    core = WorkerCore(engine, role, _gate(settings, role))
    server = Server((service, "millstream.v1.WorkerService"), _OPTIONS)
    info_servicer = WorkerInfoServicer(engine, role, _model_name(settings))
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(info_servicer, server.grpc)
    add_service(core, server)
    port = await server.listen(settings.listen)
    phase(logger, "loading the model")
    failed: asyncio.Future[ServingError] = asyncio.get_running_loop().create_future()

    def on_failure(error: ServingError) -> None:
        logger.error("the engine died; this worker leaves: %s", error.message)
        if not failed.done():
            failed.set_result(error)

    try:
        await _load(engine, core, info_servicer, on_failure)
        await server.set_serving(serving=True)
        phase(logger, "serving")
        logger.info("role=%s model=%s port=%d", role.value, _model_name(settings), port)
        return await until_signal(server, lambda: core.drain(settings.drain_s), failed)
    except ServingError as error:
        logger.error("start failed: %s", error.message, exc_info=error)  # noqa: TRY400
        await server.stop(0)
        return 1
    finally:
        await engine.close()


async def _load(
    engine: Engine,
    core: WorkerCore,
    info_servicer: WorkerInfoServicer,
    on_failure: Callable[[ServingError], None],
) -> None:
    info = await engine.start(on_failure)
    phase(logger, "warming up")
    await engine.warm_up()
    core.ready(info)
    info_servicer.ready(info)


def _model_name(settings: WorkerSettings) -> str:
    return settings.model_name or (settings.model_path.name if settings.model_path else "simulated")


def _gate(settings: WorkerSettings, role: Role) -> TicketGate | None:
    if role is Role.AGGREGATED:
        return None
    if not settings.ticket_key:
        raise SettingsError(
            "MILLSTREAM_TICKET_KEY is required: the same key, 32 random bytes in hex, for the "
            "Processor and all prefill and decode workers (make one with `openssl rand -hex 32`)"
        )
    try:
        return TicketGate(TicketKey.from_hex(settings.ticket_key))
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
