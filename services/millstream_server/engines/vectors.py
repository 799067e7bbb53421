"""What engines for vectors and scores check of inputs and of results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream_server.runtime.errors import InternalError, InvalidRequestError


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


def as_array(rows: list[Any], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Join what an engine made of inputs.

    Raises:
        InternalError: it has another shape, or a number isn't finite.
    """
    array = np.array(rows, np.float32)
    if array.shape != shape:
        raise InternalError(f"The engine made {array.shape}, not {shape}.")
    if not np.isfinite(array).all():
        raise InternalError("The model made numbers that are not finite of the inputs.")
    return array
