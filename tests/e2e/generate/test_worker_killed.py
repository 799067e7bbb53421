"""Kill -9 of the image worker in the middle of an image; it comes back.

In a file of its own, last by name: it restarts a worker that the others use.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import StatusCode

from millstream_client import Client, UnavailableError
from millstream_testing.waiting import until
from tests.e2e.generate.conftest import DRAWING, EMBEDDER, IMAGE, Suite
from tests.e2e.generate.test_images import LONG, digest, made

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]


async def test_kill_nine(suite: Suite, client: Client, bare_images: list[str]) -> None:
    worker = suite.workers[DRAWING]
    running = client.generate_image(**{**IMAGE, "steps": LONG})
    async for progress in running:
        if progress.step >= 2:
            break
    worker.kill()
    with pytest.raises(UnavailableError) as lost:
        await running.result()
    assert (lost.value.code, lost.value.reason) == (StatusCode.UNAVAILABLE, "WORKER_LOST")
    assert lost.value.retryable
    assert not running.media.files

    await until(lambda: _is_ready(client, ready=False))
    with pytest.raises(UnavailableError) as refused:
        await made(client)
    assert refused.value.reason == "NO_WORKER"
    assert refused.value.retryable
    assert len(await client.embed("the others go on", model=EMBEDDER)) == 1

    worker.start()
    await asyncio.gather(
        worker.until_serving(), until(lambda: _is_ready(client, ready=True), within_s=120)
    )
    assert digest((await made(client, seed=2)).files[0].data) == bare_images[2]


async def _is_ready(client: Client, *, ready: bool) -> bool:
    """Return whether health and ListModels both say so."""
    models: list[Any] = await client.models()
    listed = {model.name: model.ready for model in models}
    assert all(is_ready for name, is_ready in listed.items() if name != DRAWING)
    return await client.health() is listed[DRAWING] is ready
