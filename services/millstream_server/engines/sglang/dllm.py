"""Diffusion language models in SGLang: what it runs, and how it must be told to.

What SGLang's scheduler does for these models, and what follows here:

- It draws nothing: each step takes the likeliest tokens of a block. Most of a request's sampling is
  ignored in silence, and a grammar makes a request that never ends and can't be aborted. All of
  that is refused before (`generation.validation`).
- Without a limit it runs one request at a time.
- By default a block whose likeliest token is the mask itself is denoised for ever. Without
  `dllm_fdfo` the steps of a block are bounded; the tokens are the same.
- Its scheduler ends when the KV cache is full: it starts requests without regard to how long those
  that run may become, and can take none of them back. It ends, too, when its estimate of what is
  left, which falls by each request's `max_new_tokens`, is no whole number of blocks, or none. So
  `BlockBudget` keeps requests back until their longest answers fit, and `ENVIRONMENT` takes
  `max_new_tokens` out of SGLang's estimate.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

from millstream_server.control.engine import EngineLoad
from millstream_server.generation.request import GenerationRequest
from millstream_server.runtime.errors import EngineFailedError

ARCHITECTURES = (
    "SDARForCausalLM",
    "SDARMoeForCausalLM",
    "LLaDA2MoeModelLM",
    "DiffusionGemmaForBlockDiffusion",
)
"""Models that SGLang denoises (`sglang.srt.dllm.config`); a test compares them."""
ALGORITHMS = ("LowConfidence", "JointThreshold", "JointThresholdInDel", "Gemma4Renoise")
"""Modules of `sglang.srt.dllm.algorithm`; a test compares them."""

DEFAULTS: Mapping[str, object] = {"dllm_fdfo": False, "max_running_requests": 32}
"""ServerArgs that an operator may change: `-- --dllm-fdfo`, `--max-running-requests`."""

ENVIRONMENT = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "0"}
"""Read by SGLang's scheduler when it is imported."""


def check_model(directory: Path) -> None:
    """Check that SGLang denoises the model.

    Raises:
        EngineFailedError: it doesn't.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        architectures = config["architectures"]
        (architecture, *_) = architectures
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineFailedError(f"{directory}/config.json names no architecture.") from error
    if architecture not in ARCHITECTURES:
        raise EngineFailedError(
            f"{architecture} is no diffusion language model that SGLang runs; it runs "
            f"{', '.join(ARCHITECTURES)}. Other models are served by decode workers."
        )


_SPARE_BLOCKS = 3
"""Of each request: the masks that SGLang appends, and what it keeps in its estimate."""


class BlockBudget:
    """KV cache for the longest that running requests may become; first come, first served.

    All calls come from one event loop.
    """

    def __init__(self, total_tokens: int, block_tokens: int) -> None:
        self._total = self._free = total_tokens
        self._block = block_tokens
        self._holders = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def counted(self, load: EngineLoad, most_running: int) -> EngineLoad:
        """Say how many requests run: SGLang reports them all as queued."""
        open_requests = load.running_requests + load.queued_requests
        running = min(self._holders, most_running, open_requests)
        counted = {"running_requests": running, "queued_requests": open_requests - running}
        ranks = tuple(replace(rank, **counted) for rank in load.ranks[:1])  # it has one
        return replace(load, **counted, ranks=ranks)

    @contextlib.asynccontextmanager
    async def room(self, request: GenerationRequest) -> AsyncIterator[None]:
        """Wait until the request fits, and hold its tokens for the ``with`` block."""
        longest = len(request.token_ids) + request.sampling.max_new_tokens
        blocks = -(-longest // self._block) + _SPARE_BLOCKS
        tokens = min(blocks * self._block, self._total)
        await self._take(tokens)
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            self._give(tokens)

    async def _take(self, tokens: int) -> None:
        if not self._waiting and tokens <= self._free:
            self._free -= tokens
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((tokens, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._give(0)  # those behind it may fit
            else:
                self._give(tokens)
            raise

    def _give(self, tokens: int) -> None:
        self._free += tokens
        while self._waiting:
            tokens, turn = self._waiting[0]
            if not turn.cancelled():
                if tokens > self._free:
                    return
                self._free -= tokens
                turn.set_result(None)
            self._waiting.popleft()
