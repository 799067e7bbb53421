"""Models that embed or rank: what their config.json says, and checks of inputs and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream_server.runtime.errors import EngineFailedError, InternalError, InvalidRequestError


def read_config(path: Path) -> dict[str, Any]:
    """Read a file of a model.

    Raises:
        EngineFailedError: it isn't a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineFailedError(f"The model's {path.name} can't be read.") from error
    if not isinstance(content, dict):
        raise EngineFailedError(f"The model's {path.name} is not a JSON object.")
    return content


def check_ranker(config: Mapping[str, Any], *, bert: bool, segments: str) -> None:
    """Check that a classifier ranks, by token ids alone; ``segments``: what the engine lacks.

    Raises:
        EngineFailedError: it doesn't.
    """
    labels = len(config["id2label"]) if "id2label" in config else int(config.get("num_labels", 2))
    if labels != 1:
        raise EngineFailedError(
            f"The model has {labels} labels: it classifies. A model that ranks has 1."
        )
    if bert and int(config.get("type_vocab_size", 2)) > 1:
        raise EngineFailedError(
            f"The model distinguishes query and document by segment types, {segments}, so its "
            "scores would be wrong; serve it with --engine transformers."
        )


def table_positions(config: Mapping[str, Any], *, after_padding: bool) -> int:
    """Return for how many tokens an encoder's table of positions has room.

    ``after_padding``: the first token's position is pad_token_id + 1.
    """
    positions = int(config["max_position_embeddings"])
    return positions - (int(config.get("pad_token_id") or 0) + 1) * after_padding


def check_length(index: int, ids: Sequence[int], longest: int) -> None:
    """Refuse an input that would end the engine; callers have checked it before.

    Raises:
        InvalidRequestError: it is empty or too long.
    """
    if not 0 < len(ids) <= longest:
        raise InvalidRequestError.of(
            f"inputs[{index}]", f"has {len(ids)} tokens; 1 to {longest} are taken"
        )


def as_array(
    rows: Sequence[Any] | NDArray[np.float32], shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """Join what an engine made of inputs.

    Raises:
        InternalError: it has another shape, or a number isn't finite.
    """
    array = np.asarray(rows, np.float32)
    if array.shape != shape:
        raise InternalError(f"The engine made {array.shape}, not {shape}.")
    if not np.isfinite(array).all():
        raise InternalError("The model made numbers that are not finite of the inputs.")
    return array
