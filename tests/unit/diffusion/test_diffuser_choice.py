"""Which engine for images and videos the settings make, and which folders are refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from millstream_server.engines.diffusers.engine import DiffusersEngine
from millstream_server.engines.sglang.diffuser import SglangDiffuser
from millstream_server.engines.simulated.diffuser import SimulatedDiffuser
from millstream_server.runtime import settings as runtime
from millstream_server.runtime.settings import SettingsError
from millstream_server.synthesis.request import Kind
from millstream_server.worker.diffuser_choice import DiffuserKind, DiffuserSettings, make_diffuser


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    # What `engines.sglang.cpu` sets is not for the processes that other tests start.
    with mock.patch.dict(os.environ):
        yield


def _settings(*flags: str) -> DiffuserSettings:
    return runtime.load(DiffuserSettings, flags, {}, prog="test", description="")


@pytest.mark.parametrize("kind", Kind)
async def test_the_simulated_engine_makes_what_is_asked_for(kind: Kind) -> None:
    flags = ("--engine", "simulated", "--", "--step-s", "0.25", "--load-s", "0")
    engine = make_diffuser(_settings(*flags), kind, None)
    assert isinstance(engine, SimulatedDiffuser)
    assert engine.config.step_s == 0.25
    info = await engine.start(lambda _: None)
    assert info.kinds == {kind}
    assert info.image_to_image is (kind is Kind.IMAGE)


def test_diffusers_gets_its_settings(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--warm-up-timeout-s", "7")
    engine = make_diffuser(_settings(*flags), Kind.IMAGE, tmp_path)
    assert isinstance(engine, DiffusersEngine)
    config = engine._config
    assert (config.device, config.dtype, config.warm_up_timeout_s) == ("cpu", "bfloat16", 7.0)
    assert config.model_path == tmp_path


def test_sglang_gets_its_settings(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    flags = ("--engine", "sglang", "--device", "cpu", "--model-id", "Z-Image", "--num-gpus", "2")
    engine = make_diffuser(_settings(*flags, "--cancel-timeout-s", "3"), Kind.IMAGE, tmp_path)
    assert isinstance(engine, SglangDiffuser)
    config = engine._config
    assert (config.model_id, config.num_gpus, config.cancel_timeout_s) == ("Z-Image", 2, 3.0)
    assert (config.device, config.model_path) == ("cpu", tmp_path)


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    settings = DiffuserSettings(engine=DiffuserKind.DIFFUSERS)
    with pytest.raises(SettingsError, match=r"no model_index\.json"):
        make_diffuser(settings, Kind.IMAGE, tmp_path)
    with pytest.raises(SettingsError, match="--model-path is required"):
        make_diffuser(settings, Kind.IMAGE, None)
