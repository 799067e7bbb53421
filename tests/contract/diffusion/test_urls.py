"""Delivery as URLs over a real channel: files in storage, failures, cancels."""

from __future__ import annotations

import io
import threading
from pathlib import Path

from PIL import Image

from millstream.v1 import diffusion_pb2
from millstream_server.diffusion.worker.engine import DiffusionOptions
from millstream_server.diffusion.worker.files import Storage
from millstream_server.engines.simulated.diffuser import pixels_of
from millstream_testing.waiting import until
from tests.contract.diffusion.test_images import job_like
from tests.support.worker.diffusion_worker import Setup, streaming
from tests.unit.diffusion.test_storage import found, made

URL = diffusion_pb2.OUTPUT_DELIVERY_URL


def stored_in(storage: Storage) -> Setup:
    return Setup(options=DiffusionOptions(storage=storage))


async def test_outputs_are_files_at_urls_and_no_chunks_come(tmp_path: Path) -> None:
    async with streaming(stored_in(Storage(f"file://{tmp_path}", "https://x.example/p", 20))) as (
        _,
        stream,
    ):
        await stream.start(0, request_id="../up", seed=7, n=2, delivery=URL)
        view = await stream.finished(0)
        assert view.finished is not None
        assert view.chunks == []
        for index, output in enumerate(view.finished.outputs):
            below = output.url.removeprefix("https://x.example/p/")
            assert ".." not in below
            file = (tmp_path / below).read_bytes()
            assert len(file) == output.total_bytes
            image = Image.open(io.BytesIO(file))
            assert image.tobytes() == bytes(pixels_of(job_like(seed=7 + index)).data)
        assert len([name for name in found(tmp_path) if name.endswith(".png")]) == 2


async def test_a_full_disk_costs_a_retryable_error_and_leaves_nothing(tmp_path: Path) -> None:
    async with streaming(stored_in(made(tmp_path, full_after=10))) as (_, stream):
        await stream.start(0, seed=7, n=2, delivery=URL)
        view = await stream.ended(0)
        assert view.reason == "STORAGE_FAILED"
        assert view.error is not None
        assert view.error.retryable
        assert found(tmp_path) == []
        await stream.start(1, seed=7)  # as bytes
        await stream.finished(1)


async def test_when_one_output_fails_the_others_are_removed(tmp_path: Path) -> None:
    storage = made(tmp_path)
    async with streaming(stored_in(storage)) as (one, stream):
        one.engine.by_hand()
        await stream.start(0, steps=1, n=2, delivery=URL)
        one.engine.allow(2)
        await until(lambda: any(name.endswith(".png") for name in found(tmp_path)))
        storage._system.full_after = 10
        one.engine.allow(2)
        assert (await stream.ended(0)).reason == "STORAGE_FAILED"
        assert found(tmp_path) == []


async def test_a_cancel_while_a_file_is_stored_leaves_nothing(tmp_path: Path) -> None:
    going = threading.Event()
    async with streaming(stored_in(made(tmp_path, hangs=going))) as (one, stream):
        await stream.start(0, n=1, delivery=URL)
        await until(lambda: any(name.endswith(".part") for name in found(tmp_path)))
        await one.until_load(0, 0)
        await stream.start(1)  # the device is free, though the storage hangs
        await stream.finished(1)
        await stream.cancel(0)
        await stream.start(2)
        await stream.finished(2)  # the cancel has been read by then
        going.set()
        assert (await stream.ended(0)).reason == "CANCELLED"
        assert found(tmp_path) == []
