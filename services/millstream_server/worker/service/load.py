"""WatchLoad: the worker's load, as it changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from millstream.v1 import worker_pb2
from millstream_server.protobuf.common import duration
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.worker.load_report import LoadReports, LoadState

_MIN_INTERVAL_S, _MAX_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 60.0, 1.0
_QUIET_INTERVALS = 10  # an unchanged load is repeated after this many intervals


def interval_of(request: worker_pb2.WatchLoadRequest) -> float:
    """Return the interval that is asked for, in seconds.

    Raises:
        InvalidRequestError: it is out of bounds.
    """
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL_S
    interval_s = request.interval.ToNanoseconds() / 1e9
    if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
        raise InvalidRequestError.of("interval", "must be from 0.1 s to 60 s")
    return interval_s


async def watch_load(
    reports: LoadReports, dp_start: int, interval_s: float
) -> AsyncGenerator[worker_pb2.WatchLoadResponse, None]:
    """Report the load now and as it changes; times alone don't count as a change."""
    last: LoadState | None = None
    quiet = 0
    with reports.progress.watching():
        while True:
            state = await reports.state()
            if state != last or quiet >= _QUIET_INTERVALS:
                last, quiet = state, 0
                silent_s = reports.progress.silent_s(state.ranks)
                yield worker_pb2.WatchLoadResponse(load=_load_to_proto(state, dp_start, silent_s))
            quiet += 1
            await asyncio.sleep(interval_s)


def _load_to_proto(
    state: LoadState, dp_start: int, silent_s: Sequence[float]
) -> worker_pb2.LoadReport:
    load = state.engine
    ranks = (
        worker_pb2.RankLoad(
            dp_rank=dp_rank,
            running_requests=rank.running_requests,
            queued_requests=rank.queued_requests,
            queued_tokens=rank.queued_tokens,
            used_blocks=rank.used_blocks,
            total_blocks=rank.total_blocks,
            since_progress=duration(since_s),
        )
        for dp_rank, (rank, since_s) in enumerate(
            zip(state.ranks, silent_s, strict=False), dp_start
        )
    )
    return worker_pb2.LoadReport(
        running_requests=load.running_requests,
        queued_requests=load.queued_requests,
        used_blocks=load.used_blocks,
        total_blocks=load.total_blocks,
        ranks=ranks,
        prompt_tokens_total=state.tokens.prompt,
        cached_tokens_total=state.tokens.cached,
        completion_tokens_total=state.tokens.completion,
    )
