"""WorkerService: what this worker is, its load, its cached blocks, how far its model is loaded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from millstream.v1 import kv_events_pb2, worker_pb2, worker_pb2_grpc
from millstream_server.control.engine import (
    EngineLoad,
    LoadProgress,
    LoadStage,
    RankLoad,
    WorkerDescription,
)
from millstream_server.protobuf.common import duration, same_fields, values
from millstream_server.protobuf.kv_events import kv_message_to_proto, kv_position_from_proto
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    UnavailableError,
    UnsupportedFeatureError,
    WorkerDrainingError,
)
from millstream_server.runtime.rpc.call import Call
from millstream_server.worker.kv_events.log import LogReader
from millstream_server.worker.load_report import LoadState

if TYPE_CHECKING:
    from millstream_server.worker.host import WorkerHost

Describe = Callable[[WorkerDescription], worker_pb2.WorkerInfo]

SERVICE = "millstream.v1.WorkerService"
LONG_STREAMS = frozenset(
    f"{SERVICE}/{method}"
    for method in ("WatchLoad", "WatchWorkerInfo", "WatchKvEvents", "WatchLoadProgress")
)
"""Methods whose streams last as long as a connection, or a start; they get no spans."""

_MIN_INTERVAL_S, _MAX_INTERVAL_S, _DEFAULT_INTERVAL_S = 0.1, 60.0, 1.0
_QUIET_INTERVALS = 10  # an unchanged load is repeated after this many intervals
_MAX_KV_REQUEST_BYTES = 256 << 10
"""The request is held as long as the stream; the positions of 4,096 ranks take 160 KiB."""
_STAGES = {stage: worker_pb2.LoadStage.Value(f"LOAD_STAGE_{stage.name}") for stage in LoadStage}


_LOAD_FIELDS = same_fields(worker_pb2.LoadReport, EngineLoad)
_RANK_FIELDS = same_fields(worker_pb2.RankLoad, RankLoad)
_PROGRESS_FIELDS = same_fields(worker_pb2.WatchLoadProgressResponse, LoadProgress)


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves WorkerService."""

    def __init__(self, host: WorkerHost[Any]) -> None:
        self._host = host

    async def GetWorkerInfo(
        self, request: worker_pb2.GetWorkerInfoRequest, call: Call
    ) -> worker_pb2.GetWorkerInfoResponse:
        if self._host.work.leaving:
            raise _draining()
        return worker_pb2.GetWorkerInfoResponse(info=self._info())

    async def WatchWorkerInfo(
        self, request: worker_pb2.WatchWorkerInfoRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchWorkerInfoResponse]:
        """Describe the worker now and after each change, until it drains."""
        host = self._host
        sent: WorkerDescription | None = None
        with _told(host.description.listen, host.work.when_leaving) as changed:
            while not host.work.leaving:
                description = host.description.value
                if description is not None and description is not sent:
                    sent = description
                    info = host.plan.describe(description)
                    yield worker_pb2.WatchWorkerInfoResponse(info=info)
                else:
                    await changed.wait()
                    changed.clear()
        raise _draining()

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchLoadResponse]:
        """Report the load now and as it changes; times alone don't count as a change."""
        interval_s = _interval(request)
        dp_start, host = self._info().dp_start, self._host
        last: LoadState | None = None
        quiet = 0
        with host.progress.watching():
            while True:
                state = await host.load_state()
                if state != last or quiet >= _QUIET_INTERVALS:
                    last, quiet = state, 0
                    silent_s = host.progress.silent_s(state.ranks)
                    load = _load_to_proto(state, dp_start, silent_s)
                    yield worker_pb2.WatchLoadResponse(load=load)
                quiet += 1
                await asyncio.sleep(interval_s)

    async def WatchKvEvents(
        self, request: kv_events_pb2.WatchKvEventsRequest, call: Call
    ) -> AsyncIterator[kv_events_pb2.WatchKvEventsResponse]:
        """Send each rank's log from the caller's position on, a message of one, then of the next.

        While the caller doesn't read, only the message that is being written is held for it: all
        that changes meanwhile is in the next one.
        """
        log, info = self._host.plan.kv, self._info()
        if log is None or not info.block_hashing:
            raise UnsupportedFeatureError(
                "this worker has no KV events: its WorkerInfo.block_hashing is not set"
            )
        ranks = [log.rank(dp_rank) for dp_rank in _ranks(info, request)]
        at = {message.dp_rank: kv_position_from_proto(message) for message in request.positions}
        with contextlib.ExitStack() as ends:
            changed = ends.enter_context(_told(*(rank.listen for rank in ranks)))
            readers = [LogReader(rank, at.get(rank.dp_rank)) for rank in ranks]
            for reader in readers:
                ends.callback(reader.close)
            while True:
                changed.clear()
                idle = True
                for reader in readers:
                    if (message := reader.read()) is not None:
                        idle = False
                        yield kv_message_to_proto(message)
                if idle:
                    await changed.wait()

    async def WatchLoadProgress(
        self, request: worker_pb2.WatchLoadProgressRequest, call: Call
    ) -> AsyncIterator[worker_pb2.WatchLoadProgressResponse]:
        """Report how far the model is loaded, now and at each change, until it is ready."""
        loading = self._host.loading
        sent: LoadProgress | None = None
        with _told(loading.progress.listen, loading.failed.listen) as changed:
            while not loading.failed.value:
                changed.clear()
                now = loading.progress.value
                if now != sent:
                    sent = now
                    yield _progress_to_proto(now, loading.elapsed_s)
                    if now.stage is LoadStage.READY:
                        return
                else:
                    await changed.wait()
        raise UnavailableError("this worker can't load its model; its log says why")

    def _info(self) -> worker_pb2.WorkerInfo:
        """Return the worker's info, also while it drains.

        Raises:
            UnavailableError: the model is being loaded.
        """
        self._host.loaded()
        description = self._host.description.value
        assert description is not None  # noqa: S101 - it is set with the info
        return self._host.plan.describe(description)


@contextlib.contextmanager
def _told(*listens: Callable[[Callable[[], None]], Callable[[], None]]) -> Iterator[asyncio.Event]:
    """Yield an event that is set at each change which one of ``listens`` tells."""
    changed = asyncio.Event()
    with contextlib.ExitStack() as forget:
        for listen in listens:
            forget.callback(listen(changed.set))
        yield changed


def _draining() -> WorkerDrainingError:
    return WorkerDrainingError("this worker is shutting down; retry on another one")


def _interval(request: worker_pb2.WatchLoadRequest) -> float:
    """Return the interval that is asked for, in seconds."""
    if not request.HasField("interval"):
        return _DEFAULT_INTERVAL_S
    interval_s = request.interval.ToNanoseconds() / 1e9
    if not _MIN_INTERVAL_S <= interval_s <= _MAX_INTERVAL_S:
        raise InvalidRequestError.of("interval", "must be from 0.1 s to 60 s")
    return interval_s


def _ranks(info: worker_pb2.WorkerInfo, request: kv_events_pb2.WatchKvEventsRequest) -> list[int]:
    """Return the ranks to follow, each once.

    Positions of other ranks are not refused: before a restart the worker may have had more ranks.

    Raises:
        InvalidRequestError: a rank is not this worker's, or the request is too large.
    """
    if (nbytes := request.ByteSize()) > _MAX_KV_REQUEST_BYTES:
        raise InvalidRequestError.of(
            "positions", f"the request has {nbytes} bytes; {_MAX_KV_REQUEST_BYTES} are allowed"
        )
    own = range(info.dp_start, info.dp_start + info.dp_size)
    wrong = [
        FieldViolation(
            f"dp_ranks[{index}]", f"this worker has the ranks {own[0]} to {own[-1]}, not {dp_rank}"
        )
        for index, dp_rank in enumerate(request.dp_ranks)
        if dp_rank not in own
    ]
    if wrong:
        raise InvalidRequestError.of_all(wrong[:8])
    return sorted(set(request.dp_ranks)) or list(own)


# ---- conversion ----------------------------------------------------------------------------------


def _load_to_proto(
    state: LoadState, dp_start: int, silent_s: Sequence[float]
) -> worker_pb2.LoadReport:
    ranks = (
        worker_pb2.RankLoad(
            dp_rank=dp_rank, since_progress=duration(since_s), **values(rank, _RANK_FIELDS)
        )
        for dp_rank, (rank, since_s) in enumerate(
            zip(state.ranks, silent_s, strict=False), dp_start
        )
    )
    return worker_pb2.LoadReport(
        ranks=ranks,
        prompt_tokens_total=state.tokens.prompt,
        cached_tokens_total=state.tokens.cached,
        completion_tokens_total=state.tokens.completion,
        **values(state.engine, _LOAD_FIELDS),
    )


def _progress_to_proto(
    progress: LoadProgress, elapsed_s: float
) -> worker_pb2.WatchLoadProgressResponse:
    return worker_pb2.WatchLoadProgressResponse(
        stage=_STAGES[progress.stage],
        elapsed=duration(elapsed_s),
        **values(progress, _PROGRESS_FIELDS),
    )
