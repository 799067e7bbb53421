"""A worker that restarts has the weights of its last update again, or those of its start."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import tensor_pb2, worker_pb2
from millstream_server.control.operations import EngineControls
from millstream_server.engines.simulated.controls import TENSOR
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.worker.control.plan import AllowedDirectories, ControlPlan
from millstream_server.worker.control.weights_record import WeightsRecord, restored, state_of
from tests.support.worker.controlled_worker import controlled_worker, from_disk, pb, start_of
from tests.support.worker.scripted_controls import ScriptedControls


def _checkpoint(folder: Path, value: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes([value] * 8)
    (folder / "a.safetensors").write_bytes(data)
    return folder


def _in_call() -> list[Any]:
    spec = tensor_pb2.TensorSpec(element_type=tensor_pb2.ELEMENT_TYPE_FLOAT16, shape=[1])
    return [
        start_of("v3", tensors=pb.WeightsInCall()),
        pb.UpdateWeightsRequest(tensor=pb.WeightTensor(name=TENSOR, spec=spec)),
        pb.UpdateWeightsRequest(chunk=tensor_pb2.TensorChunk(offset=0, data=b"12")),
    ]


async def _restarted(folder: Path, model: Path | None = None) -> tuple[str, str]:
    """Start the worker again; return the version that it and its engine name."""
    async with controlled_worker(folder, scripted=False, model=model) as one:
        info = (await one.about.GetWorkerInfo(worker_pb2.GetWorkerInfoRequest())).info
        return info.weight_version, one.engine._state.weight_version


async def test_a_restarted_worker_has_the_version_of_its_last_update(tmp_path: Path) -> None:
    for version in ("v2", "v3"):
        path = _checkpoint(tmp_path / "weights" / version)
        async with controlled_worker(tmp_path, scripted=False) as one:
            await one.update(from_disk(path, version)).ended()
        assert await _restarted(tmp_path) == (version, version)
    assert await _restarted(tmp_path) == ("v3", "v3"), "at each restart"


def _rewritten(folder: Path) -> None:
    _checkpoint(folder / "weights" / "v2", 1)  # of the same size


def _moved(folder: Path) -> None:
    (folder / "weights" / "v2").rename(folder / "weights" / "old")


def _newer_model(folder: Path) -> None:
    _checkpoint(folder / "model", 1)


def _spoiled(folder: Path) -> None:
    (folder / "record.json").write_text('{"version": "v2"}')


@pytest.mark.parametrize("change", [_rewritten, _moved, _newer_model, _spoiled])
async def test_without_certainty_it_has_the_weights_and_the_version_of_its_start(
    tmp_path: Path, change: Callable[[Path], None]
) -> None:
    model = _checkpoint(tmp_path / "model")
    path = _checkpoint(tmp_path / "weights" / "v2")
    async with controlled_worker(tmp_path, scripted=False, model=model) as one:
        await one.update(from_disk(path)).ended()
    assert await _restarted(tmp_path, model) == ("v2", "v2")
    change(tmp_path)
    assert await _restarted(tmp_path, model) == ("v1", "v1")


async def test_weights_that_are_in_no_file_are_not_those_of_the_update_before(
    tmp_path: Path,
) -> None:
    async with controlled_worker(tmp_path, scripted=False) as one:
        await one.update(from_disk(_checkpoint(tmp_path / "weights" / "v2"))).ended()
        await one.update(_in_call()).ended()
    assert await _restarted(tmp_path) == ("v1", "v1")


class _Rewriting(ScriptedControls):
    """Has its checkpoint replaced while it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def check_weights(self, *_: Any) -> None:
        return

    async def update_weights(self, *_: Any) -> None:
        _checkpoint(self._path, 1)


class _Failing(_Rewriting):
    async def update_weights(self, *_: Any) -> None:
        raise EngineFailedError("lost")


@pytest.mark.parametrize("kind", [_Rewriting, _Failing])
async def test_a_start_that_fails_by_it_is_followed_by_one_without(
    tmp_path: Path, kind: type[_Rewriting]
) -> None:
    path = _checkpoint(tmp_path / "v2")
    record = WeightsRecord(tmp_path / "record.json")
    await record.note("v2", path, state_of(path))
    info = GeneratorInfo(engine="x", engine_version="1", max_running_requests=1, **_SIZES)
    plan = ControlPlan(
        controls=lambda: EngineControls(weights=kind(path)),
        directories=AllowedDirectories([tmp_path]),
        weights_record=tmp_path / "record.json",
    )
    with pytest.raises(EngineFailedError):
        await restored(info, plan)
    assert await restored(info, plan) is info


_SIZES: dict[str, Any] = {
    "vocab_size": 9,
    "context_length": 9,
    "block_size": 1,
    "total_blocks": 9,
}
