"""Releases: what `make release` makes and pushes, and the workflows that call it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
import yaml

from millstream_testing.waiting import until
from tests.support.deploy.deploy_tools import CHART, ROOT, Helm, tool
from tests.support.deploy.kube_rules import workloads
from tests.support.processes.ports import free_port

VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
_BUILDER = """#!/bin/sh
echo "buildah $*" >> "$0.ran"
for word; do
  [ "$before" = --digestfile ] && printf 'sha256:%064d' "$(wc -l < "$0.ran")" > "$word"
  before=$word
done
exit 0
"""
_UV = """#!/bin/sh
while [ "$1" != --out-dir ]; do shift; done
echo wheel > "$2/millstream.whl"
"""


class _Bench:
    """A machine with what a release needs; images aren't really built."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.out = folder / "bin", folder / "out"
        self.bin.mkdir()
        for name, text in (("buildah", _BUILDER), ("uv", _UV)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        (self.bin / "helm").symlink_to(tool("helm4"))

    def release(self, *flags: str, version: str = VERSION) -> subprocess.CompletedProcess[str]:
        script = str(ROOT / "deploy" / "images" / "release.py")
        command = [sys.executable, script, "--version", version, "--out", str(self.out), *flags]
        path = f"{self.bin}:/usr/bin:/bin"
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env={**os.environ, "PATH": path}
        )

    @property
    def built(self) -> list[str]:
        return (self.bin / "buildah.ran").read_text().splitlines()


@pytest.fixture
def bench(tmp_path: Path) -> _Bench:
    return _Bench(tmp_path)


@pytest.fixture
async def registry(tmp_path: Path) -> AsyncIterator[str]:
    program = shutil.which("docker-registry")
    if program is None:
        pytest.skip("no registry here: apt-get install docker-registry")
    address = f"127.0.0.1:{free_port()}"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "registry")}}
    config = tmp_path / "registry.yaml"
    config.write_text(json.dumps({"version": 0.1, "storage": storage, "http": {"addr": address}}))

    def answers() -> bool:
        try:
            with urlopen(f"http://{address}/v2/", timeout=5) as answer:
                return bool(answer.status == 200)
        except URLError:
            return False

    with (tmp_path / "registry.log").open("wb") as log:
        server = await asyncio.create_subprocess_exec(
            str(program), "serve", str(config), stdout=log, stderr=log
        )
    try:
        await until(answers, 60)
        yield address
    finally:
        server.kill()
        await server.wait()


def _without_keys(rendered: str) -> str:
    return re.sub(r"(ticket-key|api-keys): \S+", "", rendered)  # made anew each time


async def test_a_chart_from_a_registry_renders_the_same_with_images_by_digest(
    bench: _Bench, registry: str, helm4: Helm
) -> None:
    names = {"processor": "processor", "worker-vllm": "workerVllm"}
    where = ("--registry", f"{registry}/llm", "--plain-http")
    done = bench.release(*where, "--targets", " ".join(names), "--args", "--network host")
    assert done.returncode == 0, done.stderr
    builds = [line for line in bench.built if " build " in line]
    assert all("--network host --build-arg VERSION=" in line for line in builds)
    assert any("--platform linux/amd64" in line for line in builds)
    images = (bench.out / "images.txt").read_text().split()
    assert [image.partition("@")[0] for image in images] == [
        f"{registry}/llm/millstream-{name}" for name in names
    ]
    assert len({image.partition("@")[2] for image in images}) == 2
    chart = (f"oci://{registry}/llm/millstream", "--version", VERSION, "--plain-http")
    values = ["--values", str(CHART / "values-vllm.yaml")]
    pulled = helm4.run("template", "it", *chart, *values)
    used = {
        container["image"]
        for _, template in workloads([one for one in yaml.safe_load_all(pulled) if one])
        for container in template["spec"]["containers"]
    }
    assert {image for image in used if "@" in image} == set(images)
    # From this checkout, with the same images.
    for image, place in zip(images, names.values(), strict=True):
        repository, _, digest = image.partition("@")
        values += ["--set", f"image.{place}.repository={repository},image.{place}.digest={digest}"]
    made = helm4.run("template", "it", str(CHART), *values)
    assert _without_keys(made) == _without_keys(pulled)


def test_what_a_release_leaves_is_listed_with_its_checksums(bench: _Bench) -> None:
    done = bench.release("--targets", "processor worker-vllm")
    assert done.returncode == 0, done.stderr
    assert not any("push" in line for line in bench.built)
    files = {file.name for file in bench.out.iterdir()} - {"SHA256SUMS"}
    bills = {"millstream-processor.cdx.json", "millstream-worker-vllm.cdx.json"}
    assert files == {"images.txt", "millstream.whl", f"millstream-{VERSION}.tgz", *bills}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=bench.out, check=True)
    listed = (bench.out / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in listed} == files
    bill = json.loads((bench.out / "millstream-worker-vllm.cdx.json").read_text())
    urls = {component["purl"] for component in bill["components"]}
    lock = (ROOT / "requirements" / "vllm-gpu.lock").read_text()
    (torch,) = re.findall(r"^torch==(.+)$", lock, re.MULTILINE)
    assert {f"pkg:pypi/torch@{torch}", f"pkg:pypi/millstream@{VERSION}"} <= urls


def test_a_release_that_cant_be_is_refused_before_anything_is_made(bench: _Bench) -> None:
    wrong = bench.release(version="99.0")
    assert (wrong.returncode, f"pyproject.toml says {VERSION}" in wrong.stderr) == (1, True)
    unknown = bench.release("--targets", "worker-gpu")
    assert (unknown.returncode, "there is no target worker-gpu" in unknown.stderr) == (1, True)
    assert not bench.out.exists()
    bench.out.mkdir()
    again = bench.release()
    assert (again.returncode, "is there already" in again.stderr) == (1, True)


def test_a_failed_push_ends_the_release_before_the_chart_is_pushed(bench: _Bench) -> None:
    (bench.bin / "buildah").write_text("#!/bin/sh\ncase $* in *push*) exit 1; esac\n")
    done = bench.release("--registry", "127.0.0.1:1/llm", "--targets", "processor")
    assert (done.returncode, "buildah failed" in done.stderr) == (1, True)
    assert not list(bench.out.glob("*.tgz"))


def test_the_workflows_are_valid_and_call_what_there_is() -> None:
    schema = ("--builtin-schema", "vendor.github-workflows")
    linter: list[str | Path] = [tool("check-jsonschema"), *schema, *WORKFLOWS]
    done = subprocess.run(linter, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    commands = {
        file.stem: [
            step["run"]
            for job in yaml.safe_load(file.read_text())["jobs"].values()
            for step in job["steps"]
            if "run" in step
        ]
        for file in WORKFLOWS
    }
    assert any(".ci/run" in command for command in commands["ci"])
    (made,) = (command for command in commands["release"] if command.startswith("make release "))
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"(\w+)=\"", made)) <= set(
        re.findall(r"^(\w+) \?=", makefile, re.MULTILINE)
    )
    assert re.search(r"^release:", makefile, re.MULTILINE)
