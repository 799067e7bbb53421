"""`millstream models`: lists the served models."""

from __future__ import annotations

import argparse
import asyncio

from rich import box
from rich.table import Table

from millstream.v1 import media_pb2, worker_pb2
from millstream_client import Client
from millstream_server.cli.client import call_processor
from millstream_server.cli.console import open_console

_ROLES = {
    worker_pb2.WORKER_ROLE_AGGREGATED: "aggregated",
    worker_pb2.WORKER_ROLE_PREFILL: "prefill",
    worker_pb2.WORKER_ROLE_DECODE: "decode",
    worker_pb2.WORKER_ROLE_ENCODE: "encode",
}

_MEDIA = {media_pb2.MODALITY_IMAGE: "images", media_pb2.MODALITY_VIDEO: "videos"}


def run(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    return asyncio.run(call_processor(args.address, _list))


async def _list(client: Client) -> int:
    table = Table("model", "ready", "context", "chat", "takes", "workers", box=box.SIMPLE_HEAD)
    for model in await client.models():
        workers = ", ".join(
            f"{pool.connected} {_ROLES.get(pool.role, 'unknown')}" for pool in model.workers
        )
        table.add_row(
            model.name,
            "yes" if model.ready else "no, lacks workers",
            f"{model.context_length} tokens" if model.context_length else "unknown",
            "yes" if model.chat else "no template",
            ", ".join(["text", *(_MEDIA.get(kind, "unknown") for kind in model.modalities)]),
            workers or "none connected",
        )
    open_console().print(table)
    return 0
