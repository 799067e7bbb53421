"""A client's generation options, in plain types."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from millstream_server.generation.request import (
    LogprobOptions,
)
from millstream_server.generation.sampling import Sampling
from millstream_server.processor.text.model_files import GenerationDefaults
from millstream_server.runtime.priority import Priority


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one turn, not validated."""

    path: str
    """Path of their message, with a dot at the end: ``start.options.``."""
    sampling: Mapping[str, Any]
    """The fields of `Sampling` that the client set."""
    logprobs: LogprobOptions | None = None
    priority: Priority | None = Priority.NORMAL
    """None: an unknown value, which is refused."""
    n: int = 1
    stops: tuple[str, ...] = ()
    min_interval_s: float = 0.0
    return_token_ids: bool = False
    include_special_tokens: bool = False
    adapter: str = ""
    """Name of a LoRA adapter; empty: the model itself."""
    session: str = ""
    """Requests with the same one go to the same worker; empty: no preference."""
    cache_salt: str = ""
    """Requests with different ones share no KV cache."""

    def sampling_for(
        self,
        defaults: GenerationDefaults,
        tokens_left: int,
        *,
        fit: bool = False,
        refused: frozenset[str] = frozenset(),
    ) -> Sampling:
        """Fill in what the client left unset: the model's own defaults, then neutral values.

        Defaults in ``refused`` (`GeneratorInfo.refused_fields`) are left out: the client would be
        refused for what it didn't ask for.
        An unset max_new_tokens becomes ``tokens_left``, what the context leaves; with ``fit`` it is
        never more than that.
        """
        values = {**_given(defaults, refused), **self.sampling}
        most = max(1, tokens_left)
        asked = values.setdefault("max_new_tokens", most)
        if fit:
            values["max_new_tokens"] = min(asked, most)
        return Sampling(**values)


@functools.cache
def _given(defaults: GenerationDefaults, refused: frozenset[str]) -> Mapping[str, Any]:
    return {
        name: value
        for name, value in asdict(defaults).items()
        if value is not None and f"sampling.{name}" not in refused
    }
