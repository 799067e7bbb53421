"""Which engine the settings make, and what each service refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest

from millstream_server.control.engine import Role
from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.diffusion.worker.text import TextDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.engines import adapter, registry, torch_on_cpu
from millstream_server.engines.adapter import not_started
from millstream_server.engines.diffusers.engine import DiffusersEngine
from millstream_server.engines.registry import DIFFUSERS, EMBEDDERS, ENCODERS, GENERATORS
from millstream_server.engines.sglang.diffuser import SglangDiffuser
from millstream_server.engines.sglang.tower import SglangTower
from millstream_server.engines.simulated.diffuser import SimulatedDiffuser
from millstream_server.engines.simulated.encoder import SimulatedEncoder
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.tower import NoTower, TowerConfig, TransformersTower
from millstream_server.runtime import settings as runtime
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.settings import SettingsError
from tests.support.models.vision_models import FamilyName, make_vision_model

S = TypeVar("S")
_SERVICES = [
    DecodeSettings,
    TextDiffusionSettings,
    EncodeSettings,
    MediaDiffusionSettings,
    EmbeddingSettings,
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(adapter, "torch_build", lambda: None)  # whatever `make setup` chose
    # What engines set for PyTorch on a CPU is not for the processes that other tests start.
    with mock.patch.dict(os.environ):
        yield


def _settings(cls: type[S], *flags: str) -> S:
    return runtime.load(cls, flags, {}, prog="test", description="")


# ---- names


@pytest.mark.parametrize(
    ("cls", "engine", "able"),
    [
        (DecodeSettings, "diffusers", "sglang, vllm, simulated"),
        (TextDiffusionSettings, "transformers", "sglang, simulated"),
        (EncodeSettings, "diffusers", "auto, sglang, transformers, simulated"),
        (MediaDiffusionSettings, "transformers", "sglang, diffusers, simulated"),
        (EmbeddingSettings, "diffusers", "sglang, vllm, transformers, simulated"),
        *((cls, "nothing", "sglang, ") for cls in _SERVICES),
    ],
)
def test_a_service_lists_the_engines_that_can_do_its_work(
    capsys: pytest.CaptureFixture[str], cls: type[Any], engine: str, able: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _settings(cls, "--engine", engine)
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert f"--engine: {engine!r} is not one of " in error
    assert able in error


def test_whoever_asks_for_another_is_told_why() -> None:
    with pytest.raises(SettingsError) as refused:
        GENERATORS.offer("diffusers")
    assert str(refused.value) == (
        "--engine diffusers: it doesn't generate text; engines that generate text: "
        "sglang, vllm, simulated"
    )
    with pytest.raises(SettingsError, match="there is no such engine; engines that make vectors"):
        EMBEDDERS.offer("nothing")
    with pytest.raises(SettingsError, match="there is no such engine; there are sglang, "):
        registry.adapter("nothing")


def test_settings_of_engines_have_different_names() -> None:
    for cls in _SERVICES:
        names = [f.name for f in runtime.declared(cls)]
        assert len(names) == len(set(names)), cls


def test_making_an_engine_imports_no_other() -> None:
    program = """
import sys
from millstream_server.engines.registry import GENERATORS
from millstream_server.control.engine import Role
from millstream_server.decode.app import DecodeSettings
made = GENERATORS.make(DecodeSettings(engine="simulated"), Role.AGGREGATED)
assert type(made).__name__ == "SimulatedEngine"
others = ("sglang.engine", "sglang.launch", "diffusers.engine", "transformers.encoder")
found = [name for name in others if "millstream_server.engines." + name in sys.modules]
assert not found, found
assert not {"torch", "sglang", "diffusers", "transformers"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


# ---- what a start needs


class _Machine:
    """A machine without a GPU whose PyTorch is a CUDA build, unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu, self.cuda = False, "13.0"
        monkeypatch.setattr(adapter, "gpu_present", lambda: self.gpu)
        monkeypatch.setattr(adapter, "torch_build", lambda: ("2.13.0", self.cuda))

    def start(self, model: Path, device: str) -> str:
        (model / "model_index.json").write_text("{}")
        try:
            _diffuser(Kind.IMAGE, model, "--device", device)
        except SettingsError as error:
            return str(error)
        return ""


def test_a_worker_that_was_meant_to_have_a_gpu_doesnt_start_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = _Machine(monkeypatch)
    why = machine.start(tmp_path, "auto")
    assert why.startswith("--device auto: PyTorch here is built for CUDA 13.0, and this process ")
    for word in ("driver", "nvidia-smi", "runtime class", "nvidia.com/gpu", "--device cpu"):
        assert word in why
    assert machine.start(tmp_path, "cuda").startswith("--device cuda: this process sees no GPU")
    assert machine.start(tmp_path, "cpu") == ""
    machine.gpu = True
    assert (machine.start(tmp_path, "auto"), machine.start(tmp_path, "cuda")) == ("", "")
    machine.gpu, machine.cuda = False, ""
    assert machine.start(tmp_path, "auto") == ""
    assert machine.start(tmp_path, "cuda")
    _diffuser(Kind.IMAGE, None, "--engine", "simulated", "--device", "cuda")


def test_a_gpu_that_pytorch_cant_use_isnt_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = SimpleNamespace(
        cuda=SimpleNamespace(is_available=lambda: False), version=SimpleNamespace(cuda="13.0")
    )
    monkeypatch.setattr(torch_on_cpu, "gpu_present", lambda: True)
    with pytest.raises(RuntimeError, match="can't use the GPU here: look for the driver"):
        torch_on_cpu.torch_device("auto", broken)
    assert torch_on_cpu.torch_device("cpu", broken) == "cpu"
    broken.version.cuda = None
    assert torch_on_cpu.torch_device("auto", broken) == "cpu"


@pytest.mark.parametrize(
    ("absent", "module", "flags", "sentence"),
    [
        ("PIL", "encode", ["--engine", "simulated"], "PIL can't be imported here"),
        ("av", "diffusion", ["--engine", "simulated"], "av can't be imported here"),
        ("diffusers", "diffusion", [], "--engine diffusers: diffusers can't be imported here"),
        ("sglang", "decode", ["--engine", "sglang"], "--engine sglang: sglang can't be imported"),
        ("vllm", "decode", ["--engine", "vllm"], "--engine vllm: vllm can't be imported"),
        ("torch", "embedding", ["--engine", "transformers"], "--engine transformers: torch can't"),
    ],
)
def test_a_package_that_a_role_needs_is_missed_at_the_start(
    tmp_path: Path, absent: str, module: str, flags: list[str], sentence: str
) -> None:
    for name in ("model_index.json", "config.json"):
        (tmp_path / name).write_text("{}")
    program = f"""
import runpy, sys
sys.modules["{absent}"] = None
sys.argv[0] = "{module}"
runpy.run_module("millstream_server.{module}", run_name="__main__")
"""
    nowhere = ("--listen", "127.0.0.1:0", "--metrics-listen", "", "--device", "cpu")
    model = () if "simulated" in flags else ("--model-path", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program, *nowhere, *model, *flags],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "MILLSTREAM_TICKET_KEY": "ab" * 32},
    )
    assert (done.returncode, sentence in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
    assert "millstream-worker" in done.stderr


# ---- images and videos to embeddings


@pytest.mark.parametrize(
    ("family", "engine", "tower"),
    [
        ("qwen2_5_vl", "auto", SglangTower),
        ("qwen3_vl", "auto", SglangTower),
        ("gemma3", "auto", TransformersTower),
        ("qwen3_vl", "transformers", TransformersTower),
        ("qwen3_vl", "sglang", SglangTower),
    ],
)
def test_towers(tmp_path: Path, family: FamilyName, engine: str, tower: type[object]) -> None:
    make_vision_model(tmp_path, family)
    if engine == "auto":
        engine = registry.encoder_for(tmp_path)
    settings = EncodeSettings(engine=engine, model_path=tmp_path)
    encoder = ENCODERS.make(settings, Role.ENCODE)
    assert isinstance(encoder, TowerEncoder)
    assert type(encoder._tower) is tower


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_an_engine_with_a_tower_of_its_own_takes_pixels(tmp_path: Path, family: FamilyName) -> None:
    make_vision_model(tmp_path, family)
    pixels = registry.adapter("sglang").pixels
    assert pixels is not None
    encoder = pixels(tmp_path)
    assert isinstance(encoder, TowerEncoder)
    assert type(encoder._tower) is NoTower


def test_a_simulated_encoder_is_like_the_model(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    settings = EncodeSettings(engine="simulated", model_path=tmp_path)
    encoder = ENCODERS.make(settings, Role.ENCODE)
    assert isinstance(encoder, SimulatedEncoder)
    assert (encoder.config.family, encoder.config.width) == ("gemma3", 64)


def test_sglang_takes_no_gemma(tmp_path: Path) -> None:
    make_vision_model(tmp_path, "gemma3")
    settings = EncodeSettings(engine="sglang", model_path=tmp_path)
    with pytest.raises(SettingsError, match=r"--engine sglang: SGLang can't run .* gemma3"):
        ENCODERS.make(settings, Role.ENCODE)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "llama"}, "the model reads text only"),
        ({"model_type": "pixtral", "vision_config": {}}, "'pixtral' are not supported"),
    ],
)
async def test_models_without_images_are_refused(
    tmp_path: Path, config: dict[str, object], sentence: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SettingsError, match=sentence):
        registry.encoder_for(tmp_path)
    for engine in ENCODERS.names:
        with pytest.raises(SettingsError, match=sentence):
            ENCODERS.make(EncodeSettings(engine=engine, model_path=tmp_path), Role.ENCODE)
    tower = TowerConfig(model_path=tmp_path)
    encoder = TowerEncoder(tower, NoTower(tower))
    with pytest.raises(EngineFailedError):
        await encoder.start(lambda _error: None)
    await encoder.close()


# ---- prompts to images and videos


def _diffuser(kind: Kind, folder: Path | None, *flags: str) -> Any:
    path = () if folder is None else ("--model-path", str(folder))
    return DIFFUSERS.make(
        _settings(MediaDiffusionSettings, *path, *flags), Role.DIFFUSION, kind=kind
    )


@pytest.mark.parametrize("kind", Kind)
async def test_the_simulated_engine_makes_what_is_asked_for(kind: Kind) -> None:
    flags = ("--engine", "simulated", "--", "--step-s", "0.25", "--load-s", "0")
    engine = _diffuser(kind, None, *flags)
    assert isinstance(engine, SimulatedDiffuser)
    assert engine.config.step_s == 0.25
    info = await engine.start(lambda _: None)
    assert info.kinds == {kind}
    assert info.image_to_image is (kind is Kind.IMAGE)


def test_diffusers_gets_its_settings(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--warm-up-timeout-s", "7")
    engine = _diffuser(Kind.IMAGE, tmp_path, *flags)
    assert isinstance(engine, DiffusersEngine)
    config = engine._config
    assert (config.device, config.dtype, config.warm_up_timeout_s) == ("cpu", "bfloat16", 7.0)
    assert config.model_path == tmp_path


def test_sglang_gets_its_settings(tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text("{}")
    flags = ("--engine", "sglang", "--device", "cpu", "--model-id", "Z-Image", "--num-gpus", "2")
    engine = _diffuser(Kind.IMAGE, tmp_path, *flags, "--cancel-timeout-s", "3")
    assert isinstance(engine, SglangDiffuser)
    config = engine._config
    assert (config.model_id, config.num_gpus, config.cancel_timeout_s) == ("Z-Image", 2, 3.0)
    assert (config.device, config.model_path) == ("cpu", tmp_path)
    assert config.warm_up_timeout_s == 300


def test_a_folder_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no model_index\.json"):
        _diffuser(Kind.IMAGE, tmp_path)
    with pytest.raises(SettingsError, match="--model-path is required with --engine diffusers"):
        _diffuser(Kind.IMAGE, None)


def test_a_home_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not_started("SGLang").message.endswith("the worker's log has the cause.")
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    assert f"HOME is {tmp_path / 'gone'}, where" in not_started("SGLang").message
