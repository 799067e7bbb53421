"""Images of a real pipeline through the Processor: pixels, files, cancels, the queue."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest
from PIL import Image

from millstream_client import Client, GeneratedMedia, ImageFormat, RequestCancelledError
from millstream_testing.waiting import until
from tests.e2e.generate.conftest import DRAWING, IMAGE, STEPS, Suite, image_stream
from tests.support.engines.bare_pictures import pixels_digest
from tests.support.wire.long_streams import load_of
from tests.support.worker.diffusion_worker import Stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

LONG = 50
QUEUED = 20


def opened(file: bytes) -> Any:
    return Image.open(io.BytesIO(file))


def digest(file: bytes) -> str:
    return pixels_digest(opened(file).tobytes())


async def made(client: Client, **changes: Any) -> GeneratedMedia:
    return await client.generate_image(**{**IMAGE, **changes}).result()


async def test_pixels_equal_the_pipelines_own(client: Client, bare_images: list[str]) -> None:
    """The library, several at once, and two outputs of one request."""
    singles = await asyncio.gather(*(made(client, seed=seed) for seed in range(3)))
    assert [digest(one.files[0].data) for one in singles] == bare_images[:3]
    pair = await made(client, seed=3, n=2)
    assert [digest(file.data) for file in pair.files] == bare_images[3:5]
    assert [file.seed for file in pair.files] == [3, 4]
    assert pair.usage.steps == 2 * STEPS


@pytest.mark.parametrize("name", ["png", "webp"])
async def test_a_file_holds_its_settings_and_can_be_made_again(
    client: Client, bare_images: list[str], name: str
) -> None:
    """From the metadata alone: the same bytes."""
    kind = ImageFormat.Value(f"IMAGE_FORMAT_{name.upper()}")
    media = await made(client, n=2, format=kind)
    file = media.files[1]
    image = opened(file.data)
    assert (image.format, file.media_type) == (name.upper(), f"image/{name}")
    about = json.loads(image.text["millstream"] if name == "png" else image.getexif()[0x010E])
    assert about.pop("scheduler") == media.settings.scheduler
    assert about == {**IMAGE, "seed": file.seed}
    assert file.seed == media.settings.seed + 1, "each output's own"
    again = await made(client, **about, format=kind)
    assert again.files[0].data == file.data
    assert digest((await made(client, seed=1, format=kind)).files[0].data) == bare_images[1]


async def test_a_cancel_at_a_step_frees_the_device(
    suite: Suite, images: Stream, bare_images: list[str]
) -> None:
    before = await suite.steps()
    await images.start(0, **{**IMAGE, "steps": LONG})
    await images.start(1, **IMAGE, seed=2)
    await until(lambda: any(step >= 3 for _, step, _ in images.slots[0].steps))
    await images.cancel(0)
    assert (await images.ended(0)).reason == "CANCELLED"
    view = await images.finished(1)
    assert digest(view.files[0]) == bare_images[2]
    assert 3 <= await suite.steps() - before - STEPS < LONG, "the rest was not run"


async def test_leaving_the_stream_of_the_library_cancels(
    suite: Suite, client: Client, bare_images: list[str]
) -> None:
    async with client.generate_image(**{**IMAGE, "steps": LONG}) as stream:
        async for progress in stream:
            if progress.step >= 2:
                break
    running = client.generate_image(**{**IMAGE, "steps": LONG})
    await anext(running)
    running.cancel()
    with pytest.raises(RequestCancelledError):
        await running.result()
    async with load_of(suite.workers[DRAWING].address) as load:
        await load.idle(10)
    assert digest((await made(client, seed=4)).files[0].data) == bare_images[4]


async def test_a_client_that_reads_nothing_disturbs_nobody(
    suite: Suite, client: Client, bare_images: list[str]
) -> None:
    large = {**IMAGE, "width": 256, "height": 256, "steps": 1, "n": 4}
    before = await suite.steps()
    async with image_stream(suite, reads=False) as silent:
        await silent.start(0, **large)
        await until(lambda: _ran(suite, before), 60)
        assert digest((await made(client, seed=1)).files[0].data) == bare_images[1]
        silent.read_on()
        view = await silent.finished(0)
        assert len(view.files) == 4
        assert sum(map(len, view.files.values())) > 1 << 18, "more than a connection takes"


async def _ran(suite: Suite, before: int) -> bool:
    return await suite.steps() - before >= 1


async def test_many_requests_run_in_order_with_true_positions(images: Stream) -> None:
    """The first one runs until all others have learnt how many are before them."""
    await images.start(0, **{**IMAGE, "steps": LONG})
    for slot in range(1, QUEUED):
        await images.start(slot, **{**IMAGE, "steps": 2}, seed=slot)
    for slot in range(QUEUED):
        await images.finished(slot)
    assert images.order == list(range(QUEUED))
    for slot in range(1, QUEUED):
        positions = images.slots[slot].positions
        assert positions[0] == slot
        assert positions == sorted(set(positions), reverse=True), "only forward"
