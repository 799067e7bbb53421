"""What is known of each worker, and the table's numbers: of workers, ranks, models.

It imports little: the command's flags need it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import sub
from typing import Any, NamedTuple

from millstream.v1 import worker_pb2
from millstream_server.cli.client import role_name, role_order

_NEWS_S = 10.0
"""How long the table says that a worker has come back."""
_STAGES = {
    worker_pb2.LOAD_STAGE_STARTING: "starting",
    worker_pb2.LOAD_STAGE_LOADING_WEIGHTS: "loading",
    worker_pb2.LOAD_STAGE_PREPARING: "preparing",
    worker_pb2.LOAD_STAGE_WARMING_UP: "warming up",
}


class Reach(enum.Enum):
    """Whether there is a connection."""

    CONNECTING = "connecting"
    """Not yet known."""
    REACHED = "reached"
    LOST = "lost"


@dataclass(slots=True)
class WorkerState:
    """A worker as its streams tell it; times are of `time.monotonic`."""

    address: str
    name: str = ""
    """In the table of `millstream up`."""
    reach: Reach = Reach.CONNECTING
    since_s: float = 0.0
    """When `reach` or `listed` changed last."""
    listed: bool = True
    """Whether discovery still names it."""
    serving: bool | None = None
    """Health of the whole server; None: not told yet."""
    conditions: tuple[str, ...] = ()
    """Health conditions, as far as the admin port is known; they count while it isn't serving."""
    draining: bool = False
    """It shuts down."""
    info: worker_pb2.WorkerInfo | None = None
    """The last one, also of a worker that is lost."""
    load: worker_pb2.LoadReport | None = None
    load_s: float = 0.0
    """When the report came."""
    progress: worker_pb2.WatchLoadProgressResponse | None = None
    came_back: str = ""
    """ "back": the same process is reached again; "restarted": another one."""
    problem: str = ""
    """Why it isn't reached, or doesn't say more."""

    @property
    def label(self) -> str:
        return f"{self.name} {self.address}" if self.name else self.address

    @property
    def loading(self) -> bool:
        return (
            self.progress is not None
            and self.progress.stage != worker_pb2.LOAD_STAGE_READY
            and self.serving is not True
        )

    @property
    def settled(self) -> bool:
        """Whether it has told what it can tell soon."""
        if self.reach is not Reach.REACHED:
            return self.reach is Reach.LOST
        told = self.info is not None and self.load is not None
        return self.loading or bool(self.problem) or self.draining or told


class Mood(enum.Enum):
    """How good a state is."""

    GOOD = "green"
    PASSING = "yellow"
    BAD = "red"
    GONE = "dim"


class Counts(NamedTuple):
    """Tokens of a time."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    @property
    def hit_rate(self) -> float | None:
        """The share of prompt tokens that were cached; None: there were none."""
        return self.cached / self.prompt if self.prompt else None


class _Sample(NamedTuple):
    """The totals of one process at one moment."""

    worker_id: str
    at_s: float
    total: Counts


@dataclass(frozen=True, slots=True)
class RankRow:
    """One data-parallel rank."""

    rank: int
    running: int
    queued: int
    queued_tokens: int
    used_blocks: int
    total_blocks: int
    idle_s: float | None
    """Time since the last progress; None: nothing runs or waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One worker; None: not known. Up to `ranks` its fields are those of JSON."""

    address: str
    name: str
    worker_id: str
    role: str
    model: str
    health: str
    problem: str
    running: int | None
    queued: int | None
    used_blocks: int | None
    total_blocks: int | None
    hits_now: float | None
    hits: float | None
    tokens_per_s: float | None
    """None: there is only one report yet."""
    since_progress_s: float | None
    """The longest time that a busy rank has been without progress; None: none is busy."""
    weight_version: str
    device: str
    adapters: tuple[str, ...]
    ranks: tuple[RankRow, ...]
    state: WorkerState
    mood: Mood
    now: Counts | None
    """What happened since the refresh before."""
    total: Counts | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """The workers of one model together."""

    model: str
    workers: int
    serving: int
    running: int
    queued: int
    used_blocks: int
    total_blocks: int
    hits_now: float | None
    hits: float | None
    tokens_per_s: float | None


class Meter:
    """Makes rows of states, and rates of two samples; one for a table."""

    def __init__(self) -> None:
        self._samples: dict[str, _Sample] = {}

    def rows(self, states: Iterable[WorkerState], now_s: float) -> list[Row]:
        """Measure from the call before to this one."""
        rows = [self._row(state, now_s) for state in states]
        known = {row.state.address for row in rows}
        self._samples = {key: sample for key, sample in self._samples.items() if key in known}
        return rows

    def _row(self, state: WorkerState, now_s: float) -> Row:
        info, load = state.info or worker_pb2.WorkerInfo(), state.load
        health, mood = status_of(state, now_s)
        total = now = tokens_per_s = None
        if load is not None:
            total = Counts(
                load.prompt_tokens_total, load.cached_tokens_total, load.completion_tokens_total
            )
            now, seconds = self._measure(state, total, now_s)
            tokens_per_s = now.completion / seconds if now is not None else None
        ranks = tuple(_rank(rank) for rank in load.ranks) if load is not None else ()
        waits = [rank.idle_s for rank in ranks if rank.idle_s is not None]
        return Row(
            address=state.address,
            name=state.name,
            worker_id=info.worker_id,
            role=role_name(info.role) if state.info else "",
            model=info.model,
            health=health,
            problem=state.problem,
            running=load.running_requests if load else None,
            queued=load.queued_requests if load else None,
            used_blocks=load.used_blocks if load else None,
            total_blocks=load.total_blocks if load else None,
            hits_now=now.hit_rate if now is not None else None,
            hits=total.hit_rate if total is not None else None,
            tokens_per_s=tokens_per_s,
            since_progress_s=max(waits, default=None),
            weight_version=info.weight_version,
            device=info.device,
            adapters=tuple(adapter.name for adapter in info.adapters),
            ranks=ranks,
            state=state,
            mood=mood,
            now=now,
            total=total,
        )

    def _measure(
        self, state: WorkerState, total: Counts, now_s: float
    ) -> tuple[Counts | None, float]:
        """Return what happened since the last call, if it can be told, and in how many seconds."""
        worker_id = state.info.worker_id if state.info else ""
        before = self._samples.get(state.address)
        # Without a new report the totals are still the same: they are sent when they change.
        unchanged = before is not None and before.total == total
        at_s = now_s if unchanged else state.load_s
        self._samples[state.address] = _Sample(worker_id, at_s, total)
        if before is None or before.worker_id != worker_id or at_s <= before.at_s:
            return None, 0.0
        counts = Counts(*map(sub, total, before.total))
        return counts if min(counts) >= 0 else None, at_s - before.at_s


def status_of(state: WorkerState, now_s: float) -> tuple[str, Mood]:
    """Return a worker's state in a few words."""
    if not state.listed:
        return "gone", Mood.GONE
    match state.reach:
        case Reach.CONNECTING:
            return "connecting", Mood.PASSING
        case Reach.LOST:
            return "unreachable", Mood.BAD
        case Reach.REACHED:
            return _told(state, now_s)


def _told(state: WorkerState, now_s: float) -> tuple[str, Mood]:
    if state.draining:
        return "shutting down", Mood.PASSING
    if state.loading and state.progress is not None:
        return loading_line(state.progress), Mood.PASSING
    if state.problem:
        return "unknown", Mood.BAD
    if not state.serving:
        why = f": {', '.join(state.conditions)}" if state.conditions else ""
        return f"not serving{why}", Mood.BAD
    news = state.came_back if now_s - state.since_s < _NEWS_S else ""
    return f"serving, {news}" if news else "serving", Mood.GOOD


def loading_line(progress: worker_pb2.WatchLoadProgressResponse) -> str:
    """Return how far a start is, such as "loading: 3 of 12 files, 40 %"."""
    stage = _STAGES.get(progress.stage, "loading")
    if progress.stage != worker_pb2.LOAD_STAGE_LOADING_WEIGHTS:
        return stage
    parts = []
    if progress.files_total:
        parts.append(f"{progress.files_done} of {progress.files_total} files")
    if progress.bytes_total:
        parts.append(f"{min(100, progress.bytes_done * 100 // progress.bytes_total)} %")
    return f"{stage}: {', '.join(parts)}" if parts else stage


def sort_rows(rows: Iterable[Row], key: str) -> list[Row]:
    """Sort by one of `SORTS`; what is equal stays in the order of models, roles and addresses."""
    return sorted(sorted(rows, key=_order), key=SORTS[key])


def model_rows(rows: Sequence[Row]) -> list[ModelRow]:
    """Sum the workers of each model, by its name.

    In a model with prefill and decode workers both count the same prompts, and the first token:
    hits are those of the workers that compute prompts, tokens of those that send them.
    """
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row.model and row.state.listed:
            found.setdefault(row.model, []).append(row)
    return [_model_row(model, found[model]) for model in sorted(found)]


def _model_row(model: str, rows: Sequence[Row]) -> ModelRow:
    prompts = [row for row in rows if row.role != "decode"]
    answers = [row for row in rows if row.role != "prefill"]
    measured = [row.tokens_per_s for row in answers if row.tokens_per_s is not None]
    now = _sum(row.now for row in prompts if row.now is not None)
    total = _sum(row.total for row in prompts if row.total is not None)
    return ModelRow(
        model=model,
        workers=len(rows),
        serving=sum(row.mood is Mood.GOOD for row in rows),
        running=sum(row.running or 0 for row in rows),
        queued=sum(row.queued or 0 for row in rows),
        used_blocks=sum(row.used_blocks or 0 for row in rows),
        total_blocks=sum(row.total_blocks or 0 for row in rows),
        hits_now=now.hit_rate,
        hits=total.hit_rate,
        tokens_per_s=sum(measured) if measured else None,
    )


def _sum(counts: Iterable[Counts]) -> Counts:
    return Counts(*map(sum, zip(*counts, strict=True)))


def _rank(rank: worker_pb2.RankLoad) -> RankRow:
    busy = rank.running_requests > 0 or rank.queued_requests > 0
    return RankRow(
        rank=rank.dp_rank,
        running=rank.running_requests,
        queued=rank.queued_requests,
        queued_tokens=rank.queued_tokens,
        used_blocks=rank.used_blocks,
        total_blocks=rank.total_blocks,
        idle_s=rank.since_progress.ToMicroseconds() / 1e6 if busy else None,
    )


def _order(row: Row) -> tuple[str, int, str]:
    role = row.state.info.role if row.state.info else worker_pb2.WORKER_ROLE_UNSPECIFIED
    return row.model, role_order(role), row.state.label


def _largest_first(number: Callable[[Row], float | None]) -> Callable[[Row], float]:
    return lambda row: -(-1 if (found := number(row)) is None else found)


SORTS: Mapping[str, Callable[[Row], Any]] = {
    "role": lambda _: 0,
    "address": lambda row: row.address,
    "running": _largest_first(lambda row: row.running),
    "queued": _largest_first(lambda row: row.queued),
    "kv": _largest_first(
        lambda row: (row.used_blocks or 0) / row.total_blocks if row.total_blocks else None
    ),
    "hits": _largest_first(lambda row: row.hits),
    "tokens": _largest_first(lambda row: row.tokens_per_s),
}
"""By what rows can be sorted; of numbers the largest is the first."""
