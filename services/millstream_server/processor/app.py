"""The Processor process from start to exit."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path

from millstream.v1 import processor_pb2_grpc
from millstream_server.processor.core import ProcessorCore
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.servicer import ProcessorServicer
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.processor.text.model_files import UnusableModelError
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.policy import make_policy
from millstream_server.routing.pool import WorkerPool
from millstream_server.runtime.log import phase
from millstream_server.runtime.server import Server, ServerOptions, until_signal
from millstream_server.runtime.settings import SettingsError
from millstream_server.transfer.ticket import TicketKey

logger = logging.getLogger(__name__)

_SERVICE = "millstream.v1.ProcessorService"
# The text threads take the GIL from a busy event loop a few times per request, and wait this long
# each time. Python's 5 ms made a burst of 64 chats wait a second for its first tokens.
_SWITCH_INTERVAL_S = 0.0005


async def run(settings: ProcessorSettings) -> int:
    """Run a Processor; answers the process's exit code.

    It is SERVING while every model has a worker of every role it needs.
    """
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    server = Server((_SERVICE,), ServerOptions(max_receive_bytes=settings.max_receive_bytes))
    changed = asyncio.Event()
    changed.set()
    pool = WorkerPool(settings.workers, lambda: make_policy(settings.policy), changed.set)
    pacer = Pacer(settings.max_pace_s)
    core = ProcessorCore(
        _load_models(settings.model_directories()),
        pool,
        pacer,
        _ticket_key(settings.ticket_key),
        settings.text_threads,
    )
    servicer = ProcessorServicer(core)
    processor_pb2_grpc.add_ProcessorServiceServicer_to_server(servicer, server.grpc)
    port = await server.listen(settings.listen)
    logger.info("models=%s port=%d", ",".join(sorted(settings.model_directories())), port)
    phase(logger, "waiting for workers")
    pool.open()
    pacer.open()
    health = asyncio.ensure_future(_follow_readiness(core, server, changed))
    try:
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def drain() -> None:
            health.cancel()
            await core.drain(settings.drain_s)

        return await until_signal(server, drain, failed)
    finally:
        health.cancel()
        await pacer.close()
        await pool.close()
        core.close()


async def _follow_readiness(core: ProcessorCore, server: Server, changed: asyncio.Event) -> None:
    while True:
        await changed.wait()
        changed.clear()
        ready = core.ready()
        await server.set_serving(serving=ready)
        phase(logger, "serving" if ready else "waiting for workers")


def _load_models(directories: dict[str, Path]) -> dict[str, TextModel]:
    try:
        return {name: TextModel.load(directory) for name, directory in directories.items()}
    except UnusableModelError as error:
        raise SettingsError(f"--models: {error}") from error


def _ticket_key(text: str) -> TicketKey | None:
    try:
        return TicketKey.from_hex(text) if text else None
    except ValueError as error:
        raise SettingsError(f"MILLSTREAM_TICKET_KEY: {error}") from error
