"""The Protocol of an engine that embeds or ranks; adapters satisfy it structurally."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from millstream_server.control.engine import Engine, EngineInfo, Probeable, Role, Task
from millstream_server.runtime.errors import ServingError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedderInfo(EngineInfo):
    """Facts about a started engine."""

    embeds: bool
    ranks: bool
    width: int
    """Numbers of a vector; 0: it doesn't embed."""
    dimensions: tuple[int, ...]
    """To which a request may cut vectors, rising; empty: none but the width."""
    max_input_tokens: int
    vocab_size: int
    max_batch_tokens: int
    """Tokens that the engine runs in one batch; an input may have more."""
    normalizes: bool = False
    """Whether its vectors always have the length 1."""
    answers: bool = False
    """Whether it ranks by the answer of a generative model, whose prompt has the pair."""

    def tasks(self, role: Role) -> frozenset[Task]:
        does = {Task.EMBED: self.embeds, Task.RERANK: self.ranks}
        return frozenset(task for task, able in does.items() if able)


class Embedder(Engine, Probeable, Protocol):
    """An engine that embeds, or ranks. Calls may overlap; the engine batches them itself."""

    async def start(self, on_failure: Callable[[ServingError], None]) -> EmbedderInfo:
        """See `Engine.start`."""
        ...

    async def embed(self, inputs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Embed inputs: [inputs, width], as the model returns them, in the order of the inputs.

        Their lengths are the model's own, or 1 with `EmbedderInfo.normalizes`.
        The inputs are checked: not empty, within the limits, token ids within the vocabulary.
        Cancelling the call ends the work.

        Raises:
            ServingError: none of the inputs is embedded.
        """
        ...

    async def rank(self, pairs: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """Score pairs of query and document, as the model's tokenizer joins them: [pairs] logits.

        Raises:
            ServingError: none of the pairs is scored.
        """
        ...
