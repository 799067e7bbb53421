"""The image recipes: what can be shown of them without a container engine."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pip
import pytest
import yaml

from tests.support.deploy.deploy_tools import ROOT, Manifest, tool
from tests.support.deploy.kube_rules import workloads
from tests.support.models.fake_wheels import make_wheel

IMAGES = ROOT / "deploy" / "images"
DOCKERFILE = (IMAGES / "Dockerfile").read_text(encoding="utf-8")
DIGEST = "sha256:" + "0" * 64
# Each instruction on a line of its own.
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE))


def _stage(name: str) -> str:
    (found,) = re.findall(
        rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", INSTRUCTIONS, re.MULTILINE | re.DOTALL
    )
    return str(found)


def test_the_linter_finds_nothing() -> None:
    done = subprocess.run(
        [tool("hadolint"), IMAGES / "Dockerfile"], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_all_that_is_copied_is_there_and_sent_to_the_builder() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    sent = [line[1:] for line in lines if line.startswith("!")]
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", INSTRUCTIONS, re.MULTILINE)
    sources = [source for line in copies for source in line.split()]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [s for s in sources if not any(fnmatch.fnmatch(s, pattern) for pattern in sent)] == []


@pytest.mark.parametrize("target", ["processor", "worker"])
def test_a_container_is_no_root_and_ends_when_it_is_told_to(target: str) -> None:
    stage = _stage(target)
    assert "USER 65532:65532" in stage
    assert stage.rindex("USER") > stage.rindex("RUN")
    assert 'ENTRYPOINT ["tini", "--"]' in stage
    assert "HOME=/home/millstream" in stage
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", stage))
    assert labels >= {"title", "description", "source", "licenses", "version", "revision"}


def test_the_base_of_the_processor_is_named_by_its_digest() -> None:
    (image,) = re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.12\S*@sha256:[0-9a-f]{64}", image)


def test_the_base_of_the_workers_is_the_release_of_sglang_that_is_pinned() -> None:
    (image,) = re.findall(r"^ARG SGLANG_IMAGE=(\S+)$", DOCKERFILE, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (pin,) = (p for p in project["optional-dependencies"]["gpu"] if p.startswith("sglang=="))
    assert image == f"docker.io/lmsysorg/sglang:v{pin.removeprefix('sglang==')}"


@pytest.mark.parametrize(
    ("image", "allow", "code"),
    [
        (f"docker.io/lmsysorg/sglang:v1@{DIGEST}", "", 0),
        ("docker.io/lmsysorg/sglang:v1", "1", 0),
        ("docker.io/lmsysorg/sglang:v1", "", 1),
        ("docker.io/lmsysorg/sglang:v1@sha256:short", "", 1),
    ],
)
def test_a_base_without_a_digest_stops_the_build(
    tmp_path: Path, image: str, allow: str, code: int
) -> None:
    out = tmp_path / "pinned"
    done = subprocess.run(
        ["sh", IMAGES / "pinned.sh", "SGLANG_IMAGE", image, allow],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PINNED": str(out)},
    )
    assert done.returncode == code
    if code:
        assert f"docker buildx imagetools inspect {image} " in done.stderr
    else:
        assert out.read_text() == f"{image}\n"


class SglangImage:
    """A Python with made-up packages in it, as SGLang's image has real ones."""

    def __init__(self, root: Path) -> None:
        self.wheels, self.ours = root / "wheels", root / "ours"
        for folder in (self.wheels, self.ours):
            folder.mkdir()
        venv.create(root / "python", with_pip=False)
        # The tests' own pip, instead of a copy for each.
        self.pip = root / "pip"
        self.pip.mkdir()
        (self.pip / "pip").symlink_to(Path(pip.__file__).parent)
        self.python = root / "python" / "bin" / "python"
        self.lock = root / "gpu.lock"
        gpu = ["torch==2.0; extra == 'gpu'", "av==2.0; extra == 'gpu'", "new>=1; extra == 's3'"]
        extras = ["processor", "cli", "s3", "gpu"]
        make_wheel(self.ours, "millstream", "0.1", requires=["common>=1", *gpu], extras=extras)
        self.lock.write_text("torch==2.0\nav==2.0\nnew==1.0\nbelow==1.0\ncommon==1.9\n")
        make_wheel(self.wheels, "new", "1.0", requires=["below"])
        for version in ("1.0", "9.0"):
            make_wheel(self.wheels, "below", version)
            make_wheel(self.wheels, "new", version, requires=["below"])

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *map(str, command)],
            check=False,
            capture_output=True,
            text=True,
            env={
                "PIP_NO_INDEX": "1",
                "PIP_FIND_LINKS": str(self.wheels),
                "PIP_CONFIG_FILE": os.devnull,
                "PYTHONPATH": str(self.pip),
            },
        )

    def has(self, **versions: str) -> None:
        wheels = [
            make_wheel(self.wheels, name, version, requires=["av<2"] if name == "decoder" else [])
            for name, version in versions.items()
        ]
        done = self.run("-m", "pip", "install", "--no-deps", *wheels)
        assert done.returncode == 0, done.stderr

    def install(self) -> subprocess.CompletedProcess[str]:
        return self.run(IMAGES / "install_worker.py", self.lock, self.ours)

    def versions(self) -> set[str]:
        return set(self.run("-m", "pip", "list", "--format=freeze").stdout.split())


@pytest.fixture
def image(tmp_path: Path) -> SglangImage:
    return SglangImage(tmp_path)


def test_what_the_image_has_stays(image: SglangImage) -> None:
    image.has(torch="2.0+cu130", common="1.5", av="1.0")
    make_wheel(image.wheels, "av", "2.0")
    done = image.install()
    assert done.returncode == 0, done.stderr
    assert "replacing av 1.0 by 2.0" in done.stdout
    kept, added = {"torch==2.0+cu130", "common==1.5"}, {"new==1.0", "below==1.0"}
    assert image.versions() == kept | added | {"av==2.0", "millstream==0.1"}


def test_the_image_of_another_release_is_refused(image: SglangImage) -> None:
    image.has(torch="1.0")
    done = image.install()
    assert done.returncode == 1
    assert "the image's torch would have to be replaced" in done.stderr
    assert image.versions() == {"torch==1.0"}


def test_a_package_of_the_image_that_breaks_is_named(image: SglangImage) -> None:
    image.has(torch="2.0", common="1.5", av="1.0", decoder="1.0")
    make_wheel(image.wheels, "av", "2.0")
    done = image.install()
    assert done.returncode == 1
    assert "decoder 1.0 has requirement av<2, but you have av 2.0" in done.stderr


def test_the_chart_runs_what_is_in_the_images(render: Callable[..., list[Manifest]]) -> None:
    manifests = [*render("all"), *render("vllm")]
    pods = [template["spec"] for _, template in workloads(manifests)]
    containers = [c for pod in pods for c in [*pod.get("initContainers", ()), *pod["containers"]]]
    targets = {re.split("/millstream-|:", c["image"])[1] for c in containers}
    assert targets == {"processor", "worker", "worker-vllm"}
    for container in containers:
        # A command would leave out the entry point, tini.
        assert "command" not in container, container["name"]
        program, *words = container["args"]
        if program == "python":
            assert importlib.util.find_spec(f"{words[1]}.__main__"), words
        else:
            assert program == "millstream"


def _program(folder: Path, name: str, code: int) -> None:
    """Make a program that notes its arguments."""
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "{name} $*" >> "{folder}/ran"\nexit {code}\n')
    program.chmod(0o755)


def test_make_images_takes_the_builder_that_works_and_prints_the_charts_values(
    tmp_path: Path, render: Callable[..., list[Manifest]]
) -> None:
    _program(tmp_path, "docker", 1)  # without its daemon
    _program(tmp_path, "buildah", 0)
    asked = ["--targets", "processor worker-vllm", "--registry", "reg.example/llm", "--tag", "7"]
    done = subprocess.run(
        [sys.executable, IMAGES / "build.py", *asked, "--args", "--build-arg A='b c'"],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    ran = (tmp_path / "ran").read_text().splitlines()
    assert ran[:2] == ["docker info", "buildah info"]
    for line, target in zip(ran[2:], ("processor", "worker-vllm"), strict=True):
        assert line.startswith("buildah build --layers --format docker -f ")
        name = f"reg.example/llm/millstream-{target}:7"
        assert f"--target {target} -t {name} --build-arg A=b c " in line
    printed = yaml.safe_load(done.stdout.partition("-f:\n\n")[2])
    images = {
        container["image"]
        for _, template in workloads(render("vllm", values=printed))
        for container in template["spec"]["containers"]
    }
    ours = {f"reg.example/llm/millstream-{name}:7" for name in ("processor", "worker-vllm")}
    assert {image for image in images if not image.startswith("ghcr.io")} == ours


@pytest.mark.parametrize(
    ("found", "targets", "sentence"),
    [
        (("docker",), "processor", "none of docker, podman, buildah works here"),
        ((), "worker-gpu", "there is no target worker-gpu; there are processor, worker,"),
    ],
)
def test_make_images_says_what_it_lacks(
    found: Sequence[str], targets: str, sentence: str, tmp_path: Path
) -> None:
    for name in found:
        _program(tmp_path, name, 1)
    done = subprocess.run(
        [sys.executable, IMAGES / "build.py", "--targets", targets],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert (done.returncode, sentence in done.stderr) == (1, True), done.stderr


def test_every_target_has_a_place_in_the_charts_values() -> None:
    listed = re.findall(r"^#   docker build .* --target (\S+)", DOCKERFILE, re.MULTILINE)
    code = (IMAGES / "build.py").read_text(encoding="utf-8")
    places = code.partition("\nVALUES = {")[2].partition("}")[0]
    assert re.findall(r'"([\w-]+)":', places) == listed
    assert [target for target in listed if not _stage(target)] == []


def test_images_on_a_cpu_choose_pytorch_as_setup_does() -> None:
    for target, flags in (("worker-cpu", ""), ("worker-vllm-cpu", " --vllm")):
        stage = _stage(f"{target}-build")
        assert f"install.py --torch{flags} > " in stage
        assert "ARG PIP_INDEX_URL" in stage


@pytest.mark.parametrize(
    ("stage", "imports", "checks"),
    [
        ("processor-build", "", True),
        # Without their CUDA packages the requirements of SGLang and vLLM don't hold.
        ("worker-cpu-build", "'sglang.srt.server_args'", False),
        ("worker-vllm-cpu-build", "import torch, vllm", False),
        ("worker-vllm-build", "import torch, vllm", True),
        # install_worker.py calls `pip check`.
        ("worker", "import torch, sglang", False),
    ],
)
def test_a_build_ends_where_what_it_installed_cant_be_used(
    stage: str, imports: str, *, checks: bool
) -> None:
    text = _stage(stage)
    behind = text[text.rindex("/wheels") :]
    assert imports in behind
    assert checks == ("/opt/millstream/bin/python check" in behind)
