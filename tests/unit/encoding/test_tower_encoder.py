"""A tower that fails, hangs or returns nonsense; and where a model's tensors may be."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from millstream_server.encode.encoder import Prepared
from millstream_server.engines import torch_on_cpu
from millstream_server.engines.transformers import encoder as module
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.preprocessing import step_times
from millstream_server.engines.transformers.tower import TowerConfig, TowerFacts, TransformersTower
from millstream_server.media.families.family import Family
from millstream_server.media.items import Content, Modality
from millstream_server.media.tensor import ElementType
from millstream_server.runtime.errors import (
    EngineFailedError,
    InternalError,
    OverloadedError,
    ServingError,
)
from millstream_testing.waiting import until
from tests.support.models.vision_models import FamilyName, make_vision_model, picture

Run = Callable[[Sequence[Prepared]], Sequence[Any]]


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


class PlayedTower:
    """Does what a test says."""

    content = Content.ROWS

    def __init__(self, run: Run) -> None:
        self.play = run
        self.closed = 0

    def supports(self, family: Family) -> str | None:
        return None

    def load(self, family: Family) -> TowerFacts:
        return TowerFacts(engine="played", version="1", kind="played")

    def run(self, modality: Modality, batch: Sequence[Prepared]) -> Sequence[Any]:
        return self.play(batch)

    def close(self) -> None:
        self.closed += 1


def _rows(batch: Sequence[Prepared]) -> Sequence[Any]:
    import torch  # noqa: PLC0415 - seconds, for these tests only

    return [torch.ones(item.tokens, 64, dtype=torch.bfloat16) for item in batch]


async def _started(directory: Path, tower: Any, warm_up_s: float = 20.0) -> TowerEncoder:
    torch_on_cpu.prepare()
    encoder = TowerEncoder(TowerConfig(model_path=directory, warm_up_timeout_s=warm_up_s), tower)
    await encoder.start(lambda _error: None)
    return encoder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_model(tmp_path_factory.mktemp("gemma"), "gemma3")


def _raising(error: Exception) -> Run:
    def run(_batch: Sequence[Prepared]) -> Sequence[Any]:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "wanted", "sentence"),
    [
        (_raising(RuntimeError("secret")), EngineFailedError, "The vision tower failed."),
        (_raising(OutOfMemoryError("secret")), OverloadedError, "too little GPU memory"),
        (lambda _batch: [], InternalError, "0 results of 1 items"),
        (lambda b: [_rows(b)[0][:3]], InternalError, "rows of [3, 64], expected [4, 64]"),
        (lambda b: [_rows(b)[0][:, :9]], InternalError, "rows of [4, 9], expected [4, 64]"),
    ],
)
async def test_failures(gemma: Path, run: Run, wanted: type[ServingError], sentence: str) -> None:
    encoder = await _started(gemma, PlayedTower(run))
    with pytest.raises(wanted) as caught:
        encoder.encode([encoder.prepare(picture())])
    assert sentence in caught.value.message
    assert "secret" not in caught.value.message
    with pytest.raises(EngineFailedError, match="The warm-up failed"):
        await encoder.warm_up()
    await encoder.close()


async def test_half_precision_is_two_bytes(gemma: Path) -> None:
    encoder = await _started(gemma, PlayedTower(_rows))
    (tensor,) = encoder.encode([encoder.prepare(picture())])
    assert tensor.spec.element_type is ElementType.BFLOAT16
    assert tensor.data.nbytes == tensor.spec.nbytes == 4 * 64 * 2
    await encoder.close()


async def test_a_tower_that_hangs(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_TIMEOUT_S", 0.05)
    going = threading.Event()

    def hang(batch: Sequence[Prepared]) -> Sequence[Any]:
        going.wait()
        return _rows(batch)

    tower = PlayedTower(hang)
    encoder = await _started(gemma, tower, 0.2)
    with pytest.raises(EngineFailedError, match=r"longer than 0\.2 s"):
        await encoder.warm_up()
    prepared = [encoder.prepare(picture(seed=seed)) for seed in range(2)]
    batch = asyncio.create_task(asyncio.to_thread(encoder.encode, prepared))

    async def queued() -> bool:
        return (await encoder.load()).queued_requests == 2

    await until(queued)
    load = await encoder.load()
    assert (load.running_requests, encoder.progress(0)) == (1, 0)
    # The next probe waits for the one that hangs: only one of them is ever in the queue.
    probe = asyncio.create_task(encoder.probe(0))
    await asyncio.wait({probe}, timeout=0.05)
    assert (await encoder.load()).queued_requests == 2
    probe.cancel()
    await encoder.close()
    assert tower.closed == 0
    going.set()
    with pytest.raises(EngineFailedError, match="was closed"):
        await batch
    await until(lambda: tower.closed == 1)


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("qwen2_5_vl", "visual.", "model.visual."),
        ("gemma3", "vision_tower.vision_model.", "model.vision_tower."),
        ("gemma3", "multi_modal_projector.", "model.multi_modal_projector."),
    ],
)
async def test_names_and_files_of_tensors(
    tmp_path: Path, family: FamilyName, old: str, new: str
) -> None:
    """Published and newly saved checkpoints differ in names; large ones have several files."""
    make_vision_model(tmp_path, family)
    wanted = await _encoded(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    renamed = {new + k.removeprefix(old) if k.startswith(old) else k: weights[k] for k in weights}
    halves = {f"model-{half}.safetensors": list(renamed)[half::2] for half in range(2)}
    for file, names in halves.items():
        save_file({name: renamed[name] for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    np.testing.assert_array_equal(await _encoded(tmp_path), wanted)


async def _encoded(directory: Path) -> np.ndarray:
    config = TowerConfig(model_path=directory, device="cpu")
    encoder = await _started(directory, TransformersTower(config))
    (tensor,) = encoder.encode([encoder.prepare(picture())])
    await encoder.close()
    return np.frombuffer(tensor.data, np.float32)


async def test_missing_tensors_are_counted(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "qwen3_vl")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    del weights["model.visual.merger.norm.weight"]
    save_file(weights, file)
    with pytest.raises(EngineFailedError, match="1 tensors are missing, 0 unknown"):
        await _encoded(tmp_path)


@pytest.mark.parametrize(
    ("indices", "times"),
    [((0, 1, 2, 3), (0.5 / 4, 2.5 / 4)), ((0, 8, 16), (1.0, 4.0)), ((5,), (1.25,))],
)
def test_times_of_steps(indices: Sequence[int], times: tuple[float, ...]) -> None:
    assert step_times(indices, 4.0, 2) == times
