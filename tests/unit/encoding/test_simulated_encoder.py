"""The simulated tower's rule: cells, rows, geometry of each family."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Sequence
from typing import Any

import pytest

from millstream_server.encode.encoder import Prepared
from millstream_server.engines.adapter import EncoderSettings, EngineContext
from millstream_server.engines.simulated.adapter import ADAPTER
from millstream_server.engines.simulated.encoder import SimulatedEncoder, SimulatedEncoderConfig
from millstream_server.media.items import Frames, Geometry, Modality
from millstream_server.runtime.errors import InternalError, InvalidRequestError
from millstream_server.runtime.settings import EngineArguments, SettingsError


def frames(width: int, height: int, count: int = 1, **changes: Any) -> Frames:
    """Make frames whose pixel (x, y) of frame n is (x, y, n)."""
    data = bytes(
        value % 256
        for n in range(count)
        for y in range(height)
        for x in range(width)
        for value in (x, y, n)
    )
    given: dict[str, Any] = {"modality": Modality.IMAGE if count == 1 else Modality.VIDEO}
    given |= {"width": width, "height": height, "data": memoryview(data), "count": count}
    return Frames(**(given | {"indices": tuple(range(count)), "fps": 4.0} | changes))


def rows(encoder: SimulatedEncoder, prepared: Prepared) -> list[tuple[float, ...]]:
    (tensor,) = encoder.encode([prepared])
    assert tensor.spec.shape == (prepared.tokens, encoder.config.width)
    assert tensor.data.nbytes == tensor.spec.nbytes
    return list(struct.iter_unpack(f"{encoder.config.width}f", tensor.data))


def test_a_row_is_the_middle_pixel_of_its_cell_and_its_index() -> None:
    encoder = SimulatedEncoder(SimulatedEncoderConfig(width=5))
    prepared = encoder.prepare(frames(57, 28))
    assert (prepared.tokens, prepared.cost) == (3, 12)
    assert prepared.geometry == Geometry(grid=(1, 2, 6))
    assert rows(encoder, prepared) == [(9, 14, 0, 0, 0), (28, 14, 0, 1, 0), (47, 14, 0, 2, 0)]


def test_a_video_has_a_step_for_two_frames() -> None:
    encoder = SimulatedEncoder()
    prepared = encoder.prepare(frames(28, 28, 5, indices=(0, 2, 4, 6, 8)))
    assert prepared.geometry == Geometry(grid=(3, 2, 2), seconds_per_step=1.0)
    assert [row[2:4] for row in rows(encoder, prepared)] == [(0, 0), (2, 1), (4, 2)]


def test_qwen3_tells_the_time_of_each_step() -> None:
    encoder = SimulatedEncoder(SimulatedEncoderConfig(family="qwen3_vl"))
    prepared = encoder.prepare(frames(33, 32, 4))
    assert prepared.geometry == Geometry(grid=(2, 2, 4), timestamps_s=(0.0, 0.5))
    assert prepared.tokens == 4


def test_gemma_has_the_same_number_for_every_image_and_takes_no_videos() -> None:
    encoder = SimulatedEncoder(SimulatedEncoderConfig(family="gemma3", image_tokens=16))
    for size in ((5, 3), (200, 100)):
        prepared = encoder.prepare(frames(*size))
        assert (prepared.tokens, prepared.geometry) == (16, Geometry())
    with pytest.raises(InvalidRequestError, match="images only"):
        encoder.prepare(frames(8, 8, 2))


async def test_a_hang_stops_batches_and_probes_until_it_ends() -> None:
    encoder = SimulatedEncoder()
    info = await encoder.start(lambda _: None)
    assert info.modalities == frozenset(Modality)
    before = encoder.progress(0)
    await encoder.warm_up()
    assert encoder.progress(0) > before
    encoder.wedge()
    prepared = encoder.prepare(frames(8, 8))
    running = asyncio.ensure_future(asyncio.to_thread(encoder.encode, [prepared]))
    while not (await encoder.load()).running_requests:
        await asyncio.sleep(0.001)
    probe = asyncio.ensure_future(encoder.probe(0))
    with pytest.raises(InternalError, match="two batches"):
        encoder.encode([prepared])
    assert not running.done()
    assert not probe.done()
    encoder.unwedge()
    assert len(await running) == 1
    await asyncio.wait_for(probe, 5)


def test_a_fault_fails_the_batches_that_it_names() -> None:
    encoder = SimulatedEncoder()

    def fault(batch: Sequence[Prepared]) -> InternalError | None:
        return InternalError("two") if len(batch) == 2 else None

    encoder.fault = fault
    prepared = encoder.prepare(frames(8, 8))
    with pytest.raises(InternalError, match="two"):
        encoder.encode([prepared, prepared])
    assert len(encoder.encode([prepared])) == 1


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ValueError, match="family no"):
        SimulatedEncoder(SimulatedEncoderConfig(family="no"))
    offer = ADAPTER.encoder
    assert offer is not None
    given = EngineArguments(flags=("--embedding-width", "3"))
    common = offer.checked("simulated", None, EncoderSettings(engine_args=given))
    with pytest.raises(SettingsError, match="-- --embedding-width: 3 is below 4"):
        offer.make(None, EngineContext(common=common, model_path=None, model_name="m"))


async def test_the_settings_digest_tells_towers_apart() -> None:
    digests = set()
    for config in ({}, {"width": 9}, {"family": "qwen3_vl"}):
        encoder = SimulatedEncoder(SimulatedEncoderConfig(**config))
        digests.add((await encoder.start(lambda _: None)).settings_digest)
    assert len(digests) == 3
    assert {len(digest) for digest in digests} == {hashlib.sha256().digest_size}
