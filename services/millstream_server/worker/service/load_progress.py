"""WatchLoadProgress: how far the model is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from millstream.v1 import worker_pb2
from millstream_server.engines.base import LoadProgress, LoadStage
from millstream_server.protobuf.common import duration
from millstream_server.runtime.errors import UnavailableError
from millstream_server.worker.loading import Loading

_STAGES = {stage: worker_pb2.LoadStage.Value(f"LOAD_STAGE_{stage.name}") for stage in LoadStage}


async def watch_load_progress(
    loading: Loading,
) -> AsyncGenerator[worker_pb2.WatchLoadProgressResponse, None]:
    """Report the state now and each change, until the worker is ready.

    Raises:
        UnavailableError: the model can't be loaded.
    """
    changed = asyncio.Event()
    forget = (loading.progress.listen(changed.set), loading.failed.listen(changed.set))
    sent: LoadProgress | None = None
    try:
        while not loading.failed.value:
            changed.clear()
            now = loading.now
            if now != sent:
                sent = now
                yield _progress_to_proto(now, loading.elapsed_s)
                if now.stage is LoadStage.READY:
                    return
            else:
                await changed.wait()
    finally:
        for undo in forget:
            undo()
    raise UnavailableError("this worker can't load its model; its log says why")


def _progress_to_proto(
    progress: LoadProgress, elapsed_s: float
) -> worker_pb2.WatchLoadProgressResponse:
    return worker_pb2.WatchLoadProgressResponse(
        stage=_STAGES[progress.stage],
        files_done=progress.files_done,
        files_total=progress.files_total,
        bytes_done=progress.bytes_done,
        bytes_total=progress.bytes_total,
        elapsed=duration(elapsed_s),
    )
