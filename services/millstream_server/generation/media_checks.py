"""Checks of a prompt's images and videos, before and after their tensors are fetched.

They protect all requests, not only this one: placeholders, rows or widths that don't fit end
SGLang's process, and positions beyond the model's table do so too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from millstream_server.control.engine import Role
from millstream_server.generation.generator import GeneratorInfo, MediaModel
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.media.families.family import Family
from millstream_server.media.items import (
    DIGEST_BYTES,
    MAX_MEDIA_ITEMS,
    Content,
    MediaInput,
    Modality,
)
from millstream_server.runtime.errors import EmbeddingTransferError, FieldViolation

_PLURALS = {Modality.IMAGE: "images", Modality.VIDEO: "videos"}


def missing_modalities(
    media: Sequence[MediaInput], model: MediaModel | None
) -> Iterator[FieldViolation]:
    """Yield the items of a kind that the model doesn't take."""
    taken = model.modalities if model else frozenset()
    for index, item in enumerate(media):
        if item.modality not in taken:
            yield FieldViolation(
                f"media[{index}]",
                f"this model takes no {_PLURALS[item.modality]}; use a model that does",
            )


def media_violations(
    request: GenerationRequest, info: GeneratorInfo, role: Role
) -> Iterator[FieldViolation]:
    """Yield what is wrong with a prompt's items; cheap for a prompt without any.

    A Processor's info has no soft tokens: it checks less, since a worker checks all.
    """
    media, model = request.prompt.media, info.media
    if model is None or not model.soft_tokens:
        return
    if media:
        if len(media) > MAX_MEDIA_ITEMS:
            yield FieldViolation(
                "media", f"has {len(media)} items; a prompt has at most {MAX_MEDIA_ITEMS}"
            )
            return
        if any(item.modality not in model.soft_tokens for item in media):
            return  # reported by `missing_modalities`
        found = False
        for violation in _items(request, info, model, role):
            found = True
            yield violation
        if found:  # the rest would only repeat it
            return
    yield from _stray_soft_tokens(request, model)


def _items(
    request: GenerationRequest,
    info: GeneratorInfo,
    model: MediaModel,
    role: Role,
) -> Iterator[FieldViolation]:
    media = request.prompt.media
    end = 0
    for index, item in enumerate(media):
        path = f"media[{index}]"
        for violation in _spans(
            request.token_ids, item, model.soft_tokens[item.modality], path, end
        ):
            yield violation
            return
        end = item.spans[-1].start + item.spans[-1].length
        if len(item.digest) != DIGEST_BYTES:
            yield FieldViolation(
                f"{path}.digest", f"has {len(item.digest)} bytes; a SHA-256 has {DIGEST_BYTES}"
            )
        yield from _geometry(item, model, path)
        yield from _ticket(item, model, role, path)
    contents = {item.content for item in media}
    if len(contents) > 1:
        yield FieldViolation(
            "media", "some items are pixels and others embeddings; send all of a prompt alike"
        )
    if all(0 <= item.geometry.seconds_per_step < math.inf for item in media):  # else reported
        yield from too_many_positions(request, info.context_length, model, ())


def _spans(
    token_ids: Sequence[int], item: MediaInput, soft_token: int, path: str, after: int
) -> Iterator[FieldViolation]:
    """Check one item's spans; ``after`` is where the item before ended, 0 for the first."""
    if not item.spans:
        yield FieldViolation(f"{path}.spans", "is empty; an item has at least one placeholder")
    end = after
    for number, span in enumerate(item.spans):
        field = f"{path}.spans[{number}]"
        stop = span.start + span.length
        if span.length < 1:
            yield FieldViolation(field, f"has the length {span.length}; it must be at least 1")
        elif end and span.start <= end:
            yield FieldViolation(
                field,
                f"begins at {span.start}, but the one before ends at {end}: spans come in the "
                "order of the prompt, with at least one other token between them",
            )
        elif stop > len(token_ids):
            yield FieldViolation(
                field, f"ends at {stop}, but the prompt has {len(token_ids)} tokens"
            )
        elif (count := token_ids[span.start : stop].count(soft_token)) != span.length:
            yield FieldViolation(
                field,
                f"covers {span.length} tokens, but {count} of them are {soft_token}, this "
                f"model's {item.modality.value} token",
            )
        else:
            end = stop
            continue
        return


def _geometry(item: MediaInput, model: MediaModel, path: str) -> Iterator[FieldViolation]:
    geometry = item.geometry
    numbers = (geometry.seconds_per_step, *geometry.timestamps_s)
    if not all(0 <= number < math.inf for number in numbers):
        yield FieldViolation(f"{path}.geometry", "has a time that isn't a finite number from 0 on")
    if model.rules is None:
        return
    lengths = tuple(span.length for span in item.spans)
    try:
        expected = tuple(model.rules.span_lengths(item.modality, item.tokens, geometry))
    except ValueError as error:
        yield FieldViolation(f"{path}.geometry", str(error))
        return
    if lengths != expected:
        yield FieldViolation(
            f"{path}.spans",
            f"have the lengths {_few(lengths)}; its geometry needs {_few(expected)}",
        )


def _few(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:4]))
    return shown if len(lengths) <= 4 else f"{shown}, … ({len(lengths)} in all)"  # noqa: PLR2004


def _ticket(item: MediaInput, model: MediaModel, role: Role, path: str) -> Iterator[FieldViolation]:
    ticket, field = item.ticket, f"{path}.ticket"
    if role is Role.DECODE:
        if ticket is not None:
            yield FieldViolation(field, "a decode worker needs the geometry only; leave it out")
        return
    if ticket is None:
        yield FieldViolation(field, f"a worker in the role {role.value} needs one")
        return
    shape = ticket.tensor.shape
    if ticket.content is Content.PIXELS and not model.takes_pixels:
        yield FieldViolation(f"{field}.content", "this worker takes embeddings, not pixels")
        return
    if ticket.content is Content.PIXELS:
        grid = item.geometry.grid
        expected: tuple[int, ...] = (math.prod(grid) if grid else 1, *model.pixel_shape)
    else:
        expected = (item.tokens, model.embedding_width)
    if shape != expected:
        yield FieldViolation(
            f"{field}.tensor.shape",
            f"is {list(shape)}; {item.tokens} tokens of this model need {list(expected)}",
        )


def tokens_left(prompt: Prompt, context_length: int, model: MediaModel | Family | None) -> int:
    """Return how many tokens an answer may have: they and the positions after the prompt's fit."""
    if not prompt.media:
        return context_length - len(prompt)
    per_second = model.positions_per_second if model else 0
    more = sum(item.positions(per_second) - item.tokens for item in prompt.media)
    return context_length - len(prompt) - max(0, more)


def too_many_positions(
    request: GenerationRequest, most: int, model: MediaModel | Family | None, fields: Sequence[str]
) -> Iterator[FieldViolation]:
    """Yield the video whose time leads to positions beyond ``most``, the context length.

    ``fields`` has the client's names of the items, if any. `validation` reports too many tokens.
    """
    prompt, new = request.prompt, request.sampling.max_new_tokens
    if model and prompt.media and tokens_left(prompt, most, model) < new <= most - len(prompt):
        counts = [item.positions(model.positions_per_second) for item in prompt.media]
        index = max(range(len(counts)), key=lambda i: counts[i] - prompt.media[i].tokens)
        yield FieldViolation(
            fields[index] if fields else f"media[{index}].geometry.seconds_per_step",
            f"this video's {counts[index]} positions (by its time), those of the rest of the "
            f"prompt and max_new_tokens {new} exceed the context length of {most} tokens",
        )


def _stray_soft_tokens(request: GenerationRequest, model: MediaModel) -> Iterator[FieldViolation]:
    """Find placeholders that no item has; `count` and `index` run in C."""
    token_ids, media = request.token_ids, request.prompt.media
    for soft_token in set(model.soft_tokens.values()):
        covered = sum(i.tokens for i in media if model.soft_tokens[i.modality] == soft_token)
        count = token_ids.count(soft_token)
        if count > covered:
            inside = {
                position
                for item in media
                for span in item.spans
                for position in range(span.start, span.start + span.length)
            }
            position = next(
                index
                for index, token in enumerate(token_ids)
                if token == soft_token and index not in inside
            )
            yield FieldViolation(
                f"token_ids[{position}]",
                f"{soft_token} stands for a part of an image or a video: the prompt has {count} of "
                f"them, its items cover {covered}",
            )


def check_tensors(media: Sequence[MediaInput]) -> None:
    """Check what was fetched against the tickets, which `media_violations` has checked.

    Raises:
        EmbeddingTransferError: something else arrived.
    """
    for index, item in enumerate(media):
        tensor, ticket = item.tensor, item.ticket
        if tensor is None or ticket is None or tensor.spec != ticket.tensor:
            shape = list(tensor.spec.shape) if tensor else "nothing"
            wanted = list(ticket.tensor.shape) if ticket else "nothing"
            message = f"media[{index}]: {shape} arrived in place of {wanted}"
            raise EmbeddingTransferError(message)
        if tensor.data.nbytes != tensor.spec.nbytes:
            message = (
                f"media[{index}]: {tensor.data.nbytes} bytes arrived; its tensor has "
                f"{tensor.spec.nbytes}"
            )
            raise EmbeddingTransferError(message)
