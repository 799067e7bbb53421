"""The warm-up of engines that can be probed."""

from __future__ import annotations

import asyncio

from millstream_server.engines.base import Probeable
from millstream_server.runtime.errors import EngineFailedError, ServingError


async def warm_up_by_probe(engine: Probeable, limit_s: float, *, ranks: int = 1) -> None:
    """Probe each of ``ranks`` ranks, within ``limit_s`` seconds each.

    Raises:
        EngineFailedError: a probe failed or took longer.
    """
    for rank in range(ranks):
        try:
            async with asyncio.timeout(limit_s):
                await engine.probe(rank)
        except TimeoutError as error:
            raise EngineFailedError(f"The warm-up took longer than {limit_s:g} s.") from error
        except ServingError as error:
            raise EngineFailedError(f"The warm-up failed: {error.message}") from error
