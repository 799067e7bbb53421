"""Whether SGLang can go on with another engine's request, and how it is asked to.

The plugin in `on_path/` does it. SGLang ignores the parameter without the plugin, so an engine has
the ability only after it has shown that it uses it (`resumes`).
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

from millstream_server.engines.sglang.config import SglangEngineConfig
from millstream_server.engines.sglang.describe import probe_request
from millstream_server.engines.sglang.launch import BuiltEngine
from millstream_server.engines.sglang.requests.translate import generate_arguments, read_chunk
from millstream_server.generation.request import Prompt
from millstream_server.generation.sampling import Constraint, ConstraintKind
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_MISFIT = "the resumed tokens don't fit the grammar"
"""As the plugin says it."""


async def resumes(built: BuiltEngine, config: SglangEngineConfig) -> bool:
    """Try whether the engine uses resumed tokens: it refuses those that a grammar doesn't allow.

    The first time the grammar is compiled, the second time it is cached: SGLang goes two ways.
    Where the prompt runs here, it must also go on after tokens that are allowed.
    """
    try:
        async with asyncio.timeout(config.warm_up_timeout_s):
            return await _shown(built, config)
    except Exception as error:  # noqa: BLE001 - the vendor's seam: a worker serves without it, too
        log.warning("it isn't known whether SGLang resumes requests", error=error)
        return False


async def _shown(built: BuiltEngine, config: SglangEngineConfig) -> bool:
    zero = built.engine.tokenizer_manager.tokenizer.convert_tokens_to_ids("0")
    other = next(token for token in (0, 1) if token != zero)
    for _ in range(2):
        _, end = await _ended(built, config, other)
        if not end.startswith(_MISFIT):
            return False
    if config.role.hands_off:
        return True  # its peer is SGLang's fake one, whose first token fits no grammar
    tokens, _ = await _ended(built, config, zero)
    return tokens == [zero]


async def _ended(
    built: BuiltEngine, config: SglangEngineConfig, token: int
) -> tuple[list[int], str]:
    """Run a request of two zeros, of which one has come; return its tokens, and why it failed."""
    probe = probe_request(built, config.role)
    constraint = Constraint(ConstraintKind.REGEX, "00")
    request = replace(
        probe,
        prompt=Prompt((*probe.token_ids, token)),
        sampling=replace(probe.sampling, ignore_eos=False, max_new_tokens=1, constraint=constraint),
        resumed_tokens=1,
    )
    tokens: list[int] = []
    try:
        arguments = generate_arguments(request, config.role)
        async with aclosing(await built.engine.async_generate(**arguments)) as stream:
            async for raw in stream:
                chunk = read_chunk(raw)
                tokens += chunk.token_ids
                if chunk.finish_reason is not None:
                    return tokens, str(chunk.finish_reason.get("message", ""))
    except ValueError as error:  # so it raises what it refuses
        return tokens, str(error)
    return tokens, ""
