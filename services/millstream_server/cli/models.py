"""`millstream models`: lists the served models."""

from __future__ import annotations

import argparse
import asyncio

from rich import box
from rich.table import Table

from millstream.v1 import media_pb2, processor_pb2
from millstream_client import Client
from millstream_server.cli.client import call_processor
from millstream_server.cli.console import open_console
from millstream_server.cli.roles import role_name

_TASKS = {
    processor_pb2.MODEL_TASK_CHAT: "chat",
    processor_pb2.MODEL_TASK_COMPLETE: "complete",
    processor_pb2.MODEL_TASK_EMBED: "embed",
    processor_pb2.MODEL_TASK_RERANK: "rerank",
    processor_pb2.MODEL_TASK_GENERATE_IMAGE: "image",
    processor_pb2.MODEL_TASK_GENERATE_VIDEO: "video",
}
_MEDIA = {media_pb2.MODALITY_IMAGE: "images", media_pb2.MODALITY_VIDEO: "videos"}


def run(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    return asyncio.run(call_processor(args, lambda client, _: _list(client)))


async def _list(client: Client) -> int:
    table = Table("model", "ready", "does", "context", "takes", "workers", box=box.SIMPLE_HEAD)
    served = await client.models()
    with_adapters = any(model.adapters for model in served)
    if with_adapters:
        table.add_column("adapters", overflow="fold")
    for model in served:
        workers = ", ".join(f"{pool.connected} {role_name(pool.role)}" for pool in model.workers)
        table.add_row(
            model.name,
            "yes" if model.ready else "no, lacks workers",
            ", ".join(_TASKS[task] for task in model.tasks if task in _TASKS) or "unknown",
            f"{model.context_length} tokens" if model.context_length else "",
            ", ".join(["text", *(_MEDIA.get(kind, "unknown") for kind in model.modalities)]),
            workers or "none connected",
            *([", ".join(model.adapters) or "none"] if with_adapters else []),
        )
    open_console().print(table)
    return 0
