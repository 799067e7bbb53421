from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from millstream_server.cli import doctor, machine
from millstream_server.cli.doctor import check_model
from millstream_server.cli.machine import Finding, Level, miss, ok, warn
from millstream_server.cli.main import main
from millstream_server.cli.suite import models, plan
from millstream_server.engines.torch_on_cpu import torch_build


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    return tmp_path


def test_a_complete_model(model: Path) -> None:
    assert check_model(model).level is Level.OK


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(model: Path, name: str) -> None:
    (model / name).unlink()
    finding = check_model(model)
    assert finding.level is Level.MISS
    assert name in finding.what


def test_another_kind_of_vocabulary_is_enough(model: Path) -> None:
    (model / "tokenizer.json").rename(model / "tekken.json")
    assert check_model(model).level is Level.OK


def test_missing_weights(model: Path) -> None:
    for weights in model.glob("*.safetensors"):
        weights.unlink()
    assert "*.safetensors" in check_model(model).what


def test_a_shard_that_the_index_promises(model: Path) -> None:
    index = {"weight_map": {"w1": "a.safetensors", "w2": "c.safetensors", "w3": "c.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_model(model).what.endswith("lacks c.safetensors")


def test_no_chat_template_is_a_warning(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    assert check_model(model).level is Level.WARN
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert check_model(model).level is Level.OK


def test_no_model_says_what_to_give() -> None:
    assert "--model DIR" in check_model(None).next_step


def _memory(root: Path, available_gib: float, limit_gib: float | None = None) -> dict[str, Any]:
    (root / "meminfo").write_text(
        f"MemTotal: 99 kB\nMemAvailable: {int(available_gib * 2**20)} kB\n"
    )
    (root / "memory.max").write_text("max" if limit_gib is None else str(int(limit_gib * 2**30)))
    (root / "memory.current").write_text(str(2**30))
    return {"proc": root, "cgroup": root}


@pytest.mark.parametrize(
    ("available", "limit", "has_gpu", "level"),
    [
        (8, None, False, Level.OK),
        (8, 4, False, Level.OK),
        (8, 3, False, Level.MISS),  # The container has used 1 of its 3 GiB.
        (2, None, False, Level.MISS),
        (2, None, True, Level.WARN),
    ],
)
def test_memory(
    *, tmp_path: Path, available: float, limit: float | None, has_gpu: bool, level: Level
) -> None:
    found = machine.memory(has_gpu=has_gpu, **_memory(tmp_path, available, limit))
    assert found.level is level
    assert bool(found.next_step) is (level is not Level.OK)


def test_memory_of_a_container_with_the_first_cgroups(tmp_path: Path) -> None:
    files = _memory(tmp_path, 8)
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text(str(6 * 2**30))
    (tmp_path / "memory/memory.usage_in_bytes").write_text(str(2**30))
    assert machine.memory(has_gpu=False, **files).what == "memory: 5.0 GiB available"


@pytest.mark.parametrize(
    ("suite", "available", "says"),
    [
        ({"every_service": True}, 4, "this suite takes 5 GiB on the CPU"),
        ({"multimodal": True}, 3, "this suite takes 4 GiB on the CPU"),
        ({"every_service": True, "simulated": True}, 2, ""),
    ],
)
def test_memory_for_what_will_run(
    tmp_path: Path, suite: dict[str, Any], available: float, says: str
) -> None:
    found = machine.memory(has_gpu=False, **suite, **_memory(tmp_path, available))
    assert found.level is (Level.MISS if says else Level.OK)
    assert says in found.what
    if says:
        assert "`millstream up` without --" in found.next_step


def _doctor(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, str]:
    """Return the next step of each finding, by its text."""
    main(["doctor", "--json", "--address", "127.0.0.1:1", *flags])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {one["what"]: one["next_step"] for one in lines if one["level"] == "miss"}


def test_an_engine_in_an_environment_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path / "env"))
    monkeypatch.setattr(plan, "__file__", str(tmp_path / "a/b/c/d/plan.py"))
    missed = _doctor(capsys, "--engine", "vllm")
    (step,) = (step for what, step in missed.items() if "vllm" in what)
    assert step == "`make setup-vllm` in a checkout of Millstream"
    assert not any("vllm" in what for what in _doctor(capsys, "--engine", "simulated"))


def test_what_up_all_will_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(models, "_find", lambda _: None)
    missed = _doctor(capsys, "--all", "--engine", "simulated")
    for folder in ("drawing", "dllm", "embedder", "reranker"):
        (step,) = (step for what, step in missed.items() if f"demo/{folder}/model is no" in what)
        assert "in a checkout of Millstream" in step
    monkeypatch.undo()
    (missing,) = (what for what in _doctor(capsys, "--all", "--engine", "vllm") if "dllm" in what)
    assert "vllm can't serve model" in missing
    assert missing.endswith("sglang and simulated can")
    (tmp_path / "config.json").write_text("{}")
    missed = _doctor(capsys, "--multimodal", "--engine", "simulated", "--model", str(tmp_path))
    (step,) = (step for what, step in missed.items() if "takes no images" in what)
    assert step.startswith("leave --multimodal out")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", "")),
        ("__version__ = '2.14.1'\ncuda: Optional[str] = '13.0'\n", ("2.14.1", "13.0")),
        ("", ("?", "")),
    ],
)
def test_torch_build_is_read_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, str]
) -> None:
    (tmp_path / "version.py").write_text(text)
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    assert torch_build() == expected


def _installed(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    def version(name: str) -> str:
        if name not in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.5.1"

    monkeypatch.setattr(importlib.metadata, "version", version)


def _torch_of(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, cuda: str) -> None:
    (folder / "version.py").write_text(f"__version__ = '{version}'\ncuda = '{cuda}'\n")
    spec = ModuleSpec("torch", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: (
            [
                "filelock",
                'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
                'nvidia-mps; platform_system == "Plan9"',
                "cuda-toolkit[cublas]==13.0.3",
            ]
            if cuda
            else ["filelock"]
        ),
    )


def test_a_cuda_build_on_a_machine_without_a_gpu_is_fine_if_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_of(monkeypatch, tmp_path, "2.13.0+cu130", "13.0")
    _installed(monkeypatch, "nvidia-cudnn-cu13", "cuda-toolkit", "nixl-cu12", "nixl-cu13")
    torch, nixl = machine.torch(has_gpu=False, recipe="make setup")
    assert torch.level is nixl.level is Level.OK
    assert "runs on the CPU as well" in torch.what
    assert nixl.what == "nixl-cu13 1.5.1"


def test_a_cuda_build_without_its_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _torch_of(monkeypatch, tmp_path, "2.13.0+cu130", "13.0")
    _installed(monkeypatch, "nixl-cu12")
    torch, nixl = machine.torch(has_gpu=False, recipe="make setup")
    assert torch.level is nixl.level is Level.MISS
    assert "lacks nvidia-cudnn-cu13, cuda-toolkit:" in torch.what
    assert "nixl-cu13 is not installed" in nixl.what
    assert torch.next_step == nixl.next_step == "make setup"


@pytest.mark.parametrize(("name", "level"), [("nixl-cu12", Level.OK), ("nixl", Level.MISS)])
def test_a_cpu_build_takes_any_nixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, level: Level
) -> None:
    _torch_of(monkeypatch, tmp_path, "2.13.0+cpu", "")
    _installed(monkeypatch, name)
    torch, nixl = machine.torch(has_gpu=False, recipe="make setup")
    assert torch == ok("torch 2.13.0+cpu (CPU build)")
    assert nixl.level is level


def test_a_cpu_build_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _torch_of(monkeypatch, tmp_path, "2.13.0+cpu", "")
    _installed(monkeypatch, "nixl-cu13")
    torch, _ = machine.torch(has_gpu=True, recipe="make setup")
    assert torch.level is Level.MISS
    assert "millstream[gpu]" in torch.next_step


def test_grpc_packages_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dist:
        def __init__(self, name: str, version: str) -> None:
            self.name, self.version = name, version

    found = [Dist("grpcio", "1.85.0"), Dist("grpcio-status", "1.84.0"), Dist("rich", "1")]
    found += [Dist("grpcio-tools", "1.72.1")]
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    finding = machine.grpc_family()
    assert finding.level is Level.MISS
    assert "grpcio-status==1.85.0" in finding.next_step
    assert "grpcio-tools" not in finding.what  # makes stubs, and needn't agree


def test_pins_name_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: [
            "grpcio==0.0.1",
            "surely-not-installed>=2; extra == 'processor'",
            "sglang==0.5.23; extra == 'gpu'",
        ],
    )
    wrong, absent = machine.pins()
    assert wrong.next_step == "pip install 'grpcio==0.0.1'"
    assert "surely-not-installed is not installed" in absent.what


def test_an_engine_that_is_missing_has_two_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: [
            "absent>=1; extra == 'processor'",
            "absent>=1; extra == 'gpu'",
            "surely-not-installed==1; extra == 'gpu'",
        ],
    )
    first, *_ = machine.engine(has_gpu=True)
    assert "surely-not-installed" in first.what
    assert first.level is Level.MISS
    assert "millstream[gpu]" in first.next_step
    assert "--engine simulated" in first.next_step


@pytest.mark.parametrize(
    ("findings", "code"),
    [([ok("a")], 0), ([ok("a"), warn("b", "do c")], 0), ([miss("d", "do e"), ok("a")], 1)],
)
def test_exit_code_and_next_steps(
    findings: list[Finding],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(doctor, "_all", lambda *_: iter(findings))
    assert main(["doctor", "--json"]) == code
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["what"], one["next_step"]) for one in lines] == [
        (finding.what, finding.next_step) for finding in findings
    ]
    assert main(["doctor"]) == code
    shown = capsys.readouterr().out
    for finding in findings:
        assert f"{finding.level.name.lower():4}  {finding.what}" in shown
        assert finding.next_step in shown


def test_it_runs_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--address", "127.0.0.1:1"])
    shown = capsys.readouterr().out
    assert "no suite serves at 127.0.0.1:1" in shown
    for topic in ("Python", "grpcio", "memory", "disk", "shared memory", "ports", "model", "buf"):
        assert topic in shown


def test_a_pod_gets_no_advice_for_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the Processor's image, which has no engine, and shared memory of 64 MiB."""
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    small = type("Usage", (), {"total": 1 << 26, "free": 1 << 33})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "no engine: this is the Processor's image" in shown
    assert "-> set shm.size of the pool" in shown
    assert shown.endswith("\nNothing is missing in this pod.\n")
    for other in ("checkout", "millstream up", "ports", "demo/model"):
        assert other not in shown
