"""The settings of SGLang's diffusion engine, and SGLang's arguments made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millstream_server.diffusion.request import Kind
from millstream_server.engines.adapter import DiffuserEngineSettings, EngineContext
from millstream_server.engines.sglang.adapter import SglangDiffusionSettings, diffuser_config
from millstream_server.engines.sglang.diffusion.config import (
    SglangDiffuserConfig,
    generator_arguments,
)
from millstream_server.engines.sglang.diffusion.facts import read_geometry
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from tests.support.engines.engine_arguments import read_as


def _folder(root: Path, kind: str = "ZImagePipeline", **parts: dict[str, Any]) -> Path:
    (root / "model_index.json").write_text(json.dumps({"_class_name": kind}))
    for part, values in parts.items():
        (root / part).mkdir()
        (root / part / "config.json").write_text(json.dumps(values))
    return root


def _context(folder: Path | None, **common: Any) -> EngineContext:
    common_settings = DiffuserEngineSettings(**common)
    return EngineContext(common=common_settings, model_path=folder, model_name="m")


def _arguments(folder: Path, *known: str, **settings: Any) -> dict[str, object]:
    config = SglangDiffuserConfig(model_path=folder, **settings)
    return generator_arguments(config, lambda name: name in known)


@pytest.mark.parametrize(
    ("kind", "known", "settings", "expected"),
    [
        ("ZImagePipeline", (), {}, "Z-Image-Turbo"),
        ("WanPipeline", (), {}, "Wan2.1-T2V-1.3B-Diffusers"),
        ("WanPipeline", ("Wan2.1-T2V-14B-Diffusers",), {"model_id": "Wan2.1-T2V-14B-Diffusers"},
         "Wan2.1-T2V-14B-Diffusers"),
    ],
)  # fmt: skip
def test_the_model_id(
    tmp_path: Path, kind: str, known: tuple[str, ...], settings: dict[str, Any], expected: str
) -> None:
    arguments = _arguments(_folder(tmp_path, kind), *known, **settings)
    assert arguments["model_id"] == expected
    assert arguments["backend"] == "sglang"


def test_sglang_decides_where_it_knows_the_folder(tmp_path: Path) -> None:
    assert "model_id" not in _arguments(_folder(tmp_path, "Other"), str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("Other", {}, "is a Other"),
        ("ZImagePipeline", {"model_id": "Z-Imag"}, "no diffusion model with the id 'Z-Imag'"),
        ("ZImagePipeline", {"extra": {"num_gpus": 2}}, "'num_gpus' follows from"),
        ("ZImagePipeline", {"extra": {"model_id": "x"}}, "'model_id' follows from"),
    ],
)
def test_arguments_that_are_refused(
    tmp_path: Path, kind: str, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(EngineFailedError, match=sentence):
        _arguments(_folder(tmp_path, kind), **settings)


def test_further_arguments_are_passed_on(tmp_path: Path) -> None:
    context = _context(_folder(tmp_path), engine_args=read_as(tp_size=2))
    config = diffuser_config(SglangDiffusionSettings(num_gpus=2), context)
    assert generator_arguments(config, lambda _: False)["tp_size"] == 2


def test_two_engines_that_start_at_once_get_ports_of_their_own(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    names = ("master_port", "scheduler_port")
    assert len({_arguments(folder)[name] for _ in range(2) for name in names}) == 4
    context = _context(folder, engine_args=read_as(master_port=29500))
    config = diffuser_config(SglangDiffusionSettings(), context)
    assert generator_arguments(config, lambda _: False)["master_port"] == 29500


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"num_gpus": 0}, "--num-gpus is 0"),
        ({"cancel_timeout_s": 0.0}, "--cancel-timeout-s is 0"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        diffuser_config(SglangDiffusionSettings(**settings), _context(_folder(tmp_path)))


def test_a_folder_without_an_index_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no model_index\.json"):
        diffuser_config(SglangDiffusionSettings(), _context(tmp_path))
    with pytest.raises(SettingsError, match="--model-path is required"):
        diffuser_config(SglangDiffusionSettings(), _context(None))


@pytest.mark.parametrize(
    ("kind", "vae", "transformer", "expected"),
    [
        (Kind.IMAGE, {"block_out_channels": [8] * 4},
         {"all_patch_size": [2], "axes_lens": [1, 64, 32]}, (16, 512, 1)),
        (Kind.IMAGE, {}, {}, (32, None, 1)),
        (Kind.VIDEO, {"dim_mult": [1, 2, 4, 4]}, {"patch_size": [1, 2, 2], "rope_max_seq_len": 64},
         (16, 1024, 4)),
        (Kind.VIDEO, {"scale_factor_spatial": 16, "scale_factor_temporal": 8},
         {"patch_size": [1, 2, 2]}, (32, None, 8)),
    ],
)  # fmt: skip
def test_sizes_follow_from_the_models_files(
    tmp_path: Path,
    kind: Kind,
    vae: dict[str, Any],
    transformer: dict[str, Any],
    expected: tuple[int, int | None, int],
) -> None:
    geometry = read_geometry(_folder(tmp_path, vae=vae, transformer=transformer), kind)
    assert (geometry.size_step, geometry.max_side, geometry.frame_step) == expected
