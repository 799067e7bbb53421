"""From a rendered text and its encoded media to a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from millstream_server.generation.request import Prompt
from millstream_server.media.families.family import Family
from millstream_server.media.families.placing import place
from millstream_server.media.items import Content, EncodedItem, MediaInput
from millstream_server.processor.media.encoding import EncodedPart
from millstream_server.runtime.errors import InternalError


def media_prompt(
    text: str,
    family: Family,
    encoded: Sequence[EncodedPart],
    encode: Callable[[str], Sequence[int]],
    field: str,
) -> Prompt:
    """Replace the placeholders in ``text`` and tokenize it. Takes milliseconds: use a thread.

    Raises:
        InvalidRequestError: the text has more or fewer placeholders than there are media.
    """
    items = [entry.item for entry in encoded]
    for index, item in enumerate(items):
        _check(index, item, family)
    token_ids, spans = place(text, family, items, encode, field)
    media = [
        MediaInput(
            modality=item.modality,
            spans=own,
            geometry=item.geometry,
            digest=item.digest,
            content=item.content,
        )
        for item, own in zip(items, spans, strict=True)
    ]
    return Prompt(token_ids, tuple(media))


def _check(index: int, item: EncodedItem, family: Family) -> None:
    """Check what an encode worker returned against the model.

    Raises:
        InternalError: the worker serves other weights, or has a bug.
    """
    if item.content is Content.PIXELS:
        return
    wanted = (item.tokens, family.embedding_width)
    if item.tensor.shape != wanted:
        raise InternalError(
            f"the encode worker returned a tensor of the shape {list(item.tensor.shape)} for the "
            f"conversation's image or video {index}; the model needs {list(wanted)}: tokens x width"
        )
