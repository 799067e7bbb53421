"""Puts encoded items into a prompt: text with placeholders to token ids and spans."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from millstream_server.media.families.family import Family
from millstream_server.media.items import Geometry, Modality, Span
from millstream_server.runtime.errors import InternalError, InvalidRequestError


class Placeable(Protocol):
    """What of an item matters for its place; `EncodedItem` and `Prepared` have it."""

    @property
    def modality(self) -> Modality:
        """Its kind."""

    @property
    def tokens(self) -> int:
        """Tokens that it takes."""

    @property
    def geometry(self) -> Geometry:
        """Its geometry."""


Placed = tuple[list[int], tuple[tuple[Span, ...], ...]]


def place(
    text: str,
    family: Family,
    items: Sequence[Placeable],
    encode: Callable[[str], Sequence[int]],
    field: str,
) -> Placed:
    """Return the prompt's token ids, and the spans of each item in it.

    ``text`` is the rendered prompt. Call it for prompts without items too: a soft token in a user's
    text would make the engine look for an embedding that isn't there. ``items`` are in the order of
    the conversation; the placeholders of each modality are matched in their order.

    Raises:
        InvalidRequestError: ``field`` has more or fewer placeholders than items.
        InternalError: an item's tokens contradict its geometry, or its family's files the
        tokenizer.
    """
    kinds = sorted(family.modalities, key=lambda kind: kind.value)
    placeholders = re.compile(
        "|".join(f"(?P<{kind.value}>{re.escape(family.placeholder(kind))})" for kind in kinds)
    )
    in_text = [Modality(match.lastgroup) for match in placeholders.finditer(text)]
    _check_counts(in_text, family, items, field)
    waiting = {
        modality: iter([i for i, item in enumerate(items) if item.modality is modality])
        for modality in family.modalities
    }
    order = [next(waiting[modality]) for modality in in_text]
    marks = iter([family.mark(items[i].modality, items[i].geometry) for i in order])
    ids = encode(placeholders.sub(lambda _: next(marks), text))
    runs = [run for index in order for run in _runs(family, items, index)]
    softs = {family.soft_token(modality) for modality in family.modalities}
    found = [token for token in ids if token in softs]
    if len(found) > len(runs):
        raise InvalidRequestError.of(
            field,
            f"the prompt has {len(found)} of the {family.name} model's media tokens, but its "
            f"images and videos have {len(runs)}; the text must not contain any",
        )
    if found != [run.token for run in runs]:
        raise InternalError(
            f"The prompt has {len(runs)} runs of media tokens, of which the tokenizer made "
            f"{len(found)}: the model's tokenizer and config.json contradict each other."
        )
    return _expanded(ids, softs, runs, len(items))


@dataclass(frozen=True, slots=True)
class _Run:
    item: int
    token: int
    length: int


def _check_counts(
    in_text: Sequence[Modality], family: Family, items: Sequence[Placeable], field: str
) -> None:
    for modality in Modality:
        wanted = sum(item.modality is modality for item in items)
        name = modality.value
        if modality not in family.modalities:
            if wanted:
                raise InvalidRequestError.of(field, f"this model reads no {name}s; {wanted} given")
            continue
        found = in_text.count(modality)
        if found != wanted:
            raise InvalidRequestError.of(
                field,
                f"the prompt has {found} {name} placeholders ({family.placeholder(modality)}) "
                f"for {wanted} {name}s; the numbers must be equal, and the text must not contain "
                "placeholders of its own",
            )


def _runs(family: Family, items: Sequence[Placeable], index: int) -> Iterator[_Run]:
    item = items[index]
    try:
        lengths = family.span_lengths(item.modality, item.tokens, item.geometry)
    except ValueError as error:
        message = f"An encode worker returned an item that can't be placed: {error}."
        raise InternalError(message) from error
    token = family.soft_token(item.modality)
    for length in lengths:
        yield _Run(index, token, length)


def _expanded(ids: Sequence[int], softs: set[int], runs: Sequence[_Run], count: int) -> Placed:
    waiting = iter(runs)
    placed: list[int] = []
    spans: list[list[Span]] = [[] for _ in range(count)]
    for token in ids:
        length = 1
        if token in softs:
            run = next(waiting)
            length = run.length
            spans[run.item].append(Span(len(placed), length))
        placed += [token] * length
    return placed, tuple(tuple(item) for item in spans)
