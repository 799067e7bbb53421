"""Engines on diffusers, started once for a module."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.support.engines.diffuser_engines import (
    RunningDiffuser,
    diffusers_images,
    diffusers_videos,
)
from tests.support.models.tiny_pipelines import TinyPipelines


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def images(tiny_pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_images(tiny_pipelines) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def videos(tiny_pipelines: TinyPipelines) -> AsyncIterator[RunningDiffuser]:
    async with diffusers_videos(tiny_pipelines) as running:
        yield running
