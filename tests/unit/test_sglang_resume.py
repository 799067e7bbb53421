"""Whether an SGLang engine shows that it goes on with another engine's request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.requests.translate import PARAMETER
from millstream_server.engines.sglang.resume import resumes

ZERO = 7
MISFIT = "the resumed tokens don't fit the grammar: Tokens not accepted"


@dataclass
class Engine:
    """Stands where SGLang would: what it answers to one request after the other."""

    ends: list[str | int | Exception]
    """A token, or why a request is refused; one that begins with ! is raised."""
    asked: list[dict[str, Any]] = field(default_factory=list)

    @property
    def tokenizer_manager(self) -> Any:
        tokens = {"0": ZERO}
        return SimpleNamespace(tokenizer=SimpleNamespace(convert_tokens_to_ids=tokens.get))

    async def async_generate(self, **arguments: Any) -> AsyncIterator[dict[str, Any]]:
        self.asked.append(arguments)
        end = self.ends.pop(0)
        if isinstance(end, Exception):
            raise end
        if isinstance(end, str) and end.startswith("!"):
            raise ValueError(end[1:])
        return self._stream(end)

    async def _stream(self, end: str | int) -> AsyncIterator[dict[str, Any]]:
        refused = isinstance(end, str)
        reason = {"type": "abort", "message": end} if refused else {"type": "length"}
        yield {"output_ids": [] if refused else [end], "meta_info": {"finish_reason": reason}}


@pytest.mark.parametrize(
    ("role", "ends", "able"),
    [
        (Role.AGGREGATED, [MISFIT, "!" + MISFIT, ZERO], True),
        (Role.AGGREGATED, [MISFIT, MISFIT, 3], False),
        (Role.AGGREGATED, [3], False),  # without the plugin it begins with the grammar again
        (Role.AGGREGATED, [MISFIT, 3], False),  # of the two ways one isn't hooked
        (Role.AGGREGATED, ["no grammars here"], False),
        (Role.AGGREGATED, [RuntimeError("of the vendor")], False),
        (Role.DECODE, [MISFIT, MISFIT], True),
        (Role.PREFILL, [3], False),
    ],
)
async def test_an_engine_has_the_ability_if_it_shows_it(
    role: Role, ends: list[str | int | Exception], *, able: bool
) -> None:
    engine = Engine([*ends])
    built = SimpleNamespace(engine=engine, fake_bootstrap_host="2.2.2.2")
    config = SglangEngineConfig(model_path="/m", role=role, engine_tokenizer=True)
    assert await resumes(cast("BuiltEngine", built), config) is able
    assert engine.ends == []
    for asked in engine.asked:
        assert asked["sampling_params"]["custom_params"] == {PARAMETER: 1}
        assert asked["sampling_params"]["regex"] == "00"
