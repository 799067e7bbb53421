"""Workers as routing uses them, and their data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from millstream_server.control.engine import EngineInfo, EngineLoad, RankLoad, WorkerDescription

InfoT = TypeVar("InfoT", bound=EngineInfo)


def _ignore(_: object) -> None:
    pass


@dataclass(slots=True, eq=False)
class Place:
    """Where requests can go: a worker with one data-parallel rank, or a rank of a worker with more.

    `WorkerView` counts the requests, routing only reads.
    """

    address: str
    """The worker's."""
    name: str = field(init=False)
    """Its address, and the rank where there are several."""
    in_flight: int = field(default=0, kw_only=True)
    """Our requests that have not ended there."""
    pending_tokens: int = field(default=0, kw_only=True)
    """Prompt tokens that it probably has to compute for those of them without a first token."""
    member: int = field(default=-1, kw_only=True)
    """Its number in its model's `PrefixIndex`; -1: it has none."""
    on_load: Callable[[Any], None] = field(default=_ignore, kw_only=True)
    """Called after a change of `in_flight`, `pending_tokens` or `load`."""

    def __post_init__(self) -> None:
        self.name = self.address

    def leave_index(self) -> None:
        self.member, self.on_load = -1, _ignore


@dataclass(slots=True, eq=False)
class WorkerView(Place):
    """One worker's state."""

    description: WorkerDescription | None = None
    """Its description while it accepts new requests; else None."""
    last_description: WorkerDescription | None = None
    """Its description when it last accepted requests; None: it never did."""
    in_use: int = 0
    """Those of our requests that were not cancelled."""
    load: EngineLoad | None = None
    """Its last load report; None: there is none, or it is too old. The link uses `report`."""
    ranks: list[RankView] = field(default_factory=list)
    """Its data-parallel ranks; empty: it has one, or has not been a candidate yet."""
    dp_rank: None = field(default=None, init=False)

    @property
    def worker(self) -> WorkerView:
        return self

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that queue there by its last report, other Processors' included."""
        ranks = self.load.ranks if self.load else ()
        return ranks[0].queued_tokens if len(ranks) == 1 else 0

    def report(self, load: EngineLoad | None) -> None:
        self.load = load
        for place in self.ranks or (self,):
            place.on_load(place)

    def begin(self, place: Place, tokens: int = 0) -> None:
        """Count a request that starts at ``place``: this worker, or one of its ranks.

        ``tokens``: prompt tokens that it probably has to compute.
        """
        self.in_flight += 1
        self.in_use += 1
        if place is not self:
            place.in_flight += 1
        place.pending_tokens += tokens
        place.on_load(place)

    def computed(self, place: Place, tokens: int) -> None:
        """Count these tokens of a request's prompt as computed: it has its first token."""
        place.pending_tokens -= tokens
        place.on_load(place)

    def cancelled(self) -> None:
        """Count a request as cancelled; it still runs until its end."""
        self.in_use -= 1

    def end(self, place: Place, tokens: int = 0, *, cancelled: bool = False) -> None:
        """Count a request as ended; ``tokens`` are those of `begin` that were not computed."""
        self.in_flight -= 1
        if not cancelled:
            self.in_use -= 1
        if place is not self:
            place.in_flight -= 1
        place.pending_tokens -= tokens
        place.on_load(place)


@dataclass(slots=True, eq=False)
class RankView(Place):
    """One rank of a worker that has several; its worker's counts are the sums."""

    worker: WorkerView
    number: int
    """From 0."""
    dp_rank: int
    """As in `GenerationRequest.dp_rank`."""

    def __post_init__(self) -> None:
        self.name = f"{self.address} rank {self.dp_rank}"

    @property
    def load(self) -> RankLoad | None:
        """The rank's part of the worker's last report."""
        ranks = self.worker.load.ranks if self.worker.load else ()
        return ranks[self.number] if self.number < len(ranks) else None

    @property
    def queued_tokens(self) -> int:
        return self.load.queued_tokens if self.load else 0


Candidate = WorkerView | RankView
"""What a policy chooses from."""


def known(view: WorkerView) -> WorkerDescription | None:
    """Return a worker's description, the last one while it accepts no requests."""
    return view.description or view.last_description


def info_of(description: WorkerDescription | None, kind: type[InfoT]) -> InfoT | None:
    """Return what a worker says about an ability; None: it doesn't have it."""
    if description is not None:
        for info in (description.encoder, description.engine):
            if isinstance(info, kind):
                return info
    return None


def candidates_of(view: WorkerView, description: WorkerDescription) -> Sequence[Candidate]:
    """Return where requests to a worker can go: the worker itself, or each of its ranks."""
    numbers = description.engine.dp_ranks
    if not numbers:
        view.ranks = []
        return (view,)
    if [rank.dp_rank for rank in view.ranks] != list(numbers):
        view.ranks = [RankView(view.address, view, i, rank) for i, rank in enumerate(numbers)]
    return view.ranks
