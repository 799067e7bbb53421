"""Which decode workers can go on after which prefill workers of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.ticket import KvTransfer
from millstream_server.routing.workers import Candidate, WorkerView, info_of

_BOTH = (Role.PREFILL, Role.DECODE)
_SHOWN = 3


class Side(NamedTuple):
    """What of a worker decides over its peers."""

    weight_version: str
    engine: str
    kind: str
    """Of its `KvTransfer`; empty: it names none, as before contract 1.2."""
    needs_data: bool
    """See `KvTransfer.needs_data`."""

    def fits(self, other: Side) -> bool:
        """Return whether two workers can transfer KV caches.

        The KV cache of other weights would give wrong answers. A worker that names no kind fits
        those of its engine which need no more than it knows.
        """
        if self.weight_version != other.weight_version:
            return False
        if self.kind and other.kind:
            return self.kind == other.kind
        return self.engine == other.engine and not (self.needs_data or other.needs_data)

    @property
    def way(self) -> str:
        """Its kind, or where it names none its engine."""
        return self.kind or self.engine


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Why a model's prefill and decode workers make no pair."""

    sentence: str
    by_version: bool
    """Whether it is their weight versions."""


def side_of(view: WorkerView) -> Side:
    """Return what of a worker decides over its peers."""
    engine = info_of(view.description, GeneratorInfo)
    if engine is None:
        return Side("", "", "", needs_data=False)
    own = engine.kv_transfer
    return Side(
        engine.weight_version,
        engine.engine,
        own.kind if own else "",
        needs_data=own is not None and own.needs_data,
    )


def shared_transfer(prefill: Candidate, decode: Candidate) -> KvTransfer | None:
    """Return the prefill worker's way of handing off; None: one of the two names none."""
    first = info_of(prefill.worker.description, GeneratorInfo)
    second = info_of(decode.worker.description, GeneratorInfo)
    return first.kv_transfer if first and second and second.kv_transfer else None


def pair(
    by_role: dict[Role, list[WorkerView]],
) -> tuple[dict[Side, list[WorkerView]], Unpaired | None]:
    """Keep only prefill and decode workers that fit one of the other role.

    Return the decode workers for each prefill worker's side, and why there is none although there
    are both roles.
    """
    if not all(by_role[role] for role in _BOTH):
        return {}, None
    prompts, tokens = ([(view, side_of(view)) for view in by_role[role]] for role in _BOTH)
    decode_of = {
        side: [view for view, other in tokens if side.fits(other)]
        for side in dict.fromkeys(side for _, side in prompts)
    }
    decode_of = {side: views for side, views in decode_of.items() if views}
    by_role[Role.PREFILL] = [view for view, side in prompts if side in decode_of]
    by_role[Role.DECODE] = [
        view for view, other in tokens if any(side.fits(other) for side in decode_of)
    ]
    sides = [{side for _, side in of} for of in (prompts, tokens)]
    return decode_of, None if decode_of else _unpaired(*sides)


def _unpaired(prompts: set[Side], tokens: set[Side]) -> Unpaired:
    def against(name: Callable[[Side], str]) -> str:
        return f"{_shown(map(name, prompts))} against {_shown(map(name, tokens))}"

    start = "this model's prefill and decode workers have different"
    if {side.weight_version for side in prompts}.isdisjoint(side.weight_version for side in tokens):
        versions = against(lambda side: side.weight_version)
        sentence = f"{start} weight versions ({versions}); retry when they are updated"
        return Unpaired(sentence, by_version=True)
    ways = against(lambda side: side.way)
    sentence = f"{start} ways of KV transfer ({ways}); start both with the same"
    return Unpaired(sentence, by_version=False)


def _shown(names: Iterable[str]) -> str:
    """Name some, as far as there is room in a sentence."""
    found = sorted(set(names))
    return ", ".join(repr(name) for name in found[:_SHOWN]) + (", …" if found[_SHOWN:] else "")
