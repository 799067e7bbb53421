"""Builds the images and runs them as the chart does: `make images-check`.

A Processor, a prefill and a decode worker on real SGLang, in pods as the chart writes them: its
arguments, configuration, probes and times, a read-only root, no capabilities, a user that isn't
root. A chat is answered; then SIGTERM must end each with 0. What is this machine's: the network,
addresses, and the model's directory.

Prints sizes, digests, and where the bills of materials are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_client import Client
from millstream_testing.waiting import until
from tests.images import materials, stand_in
from tests.images.container import USER, Bundles, Daemon, Engine, ImageContainer
from tests.support.deploy.cluster.cluster import Cluster, pod_address
from tests.support.deploy.cluster.container import Container
from tests.support.deploy.cluster.pod import Pod
from tests.support.deploy.deploy_tools import ROOT, Helm, Manifest, tool

sys.path.insert(0, str(ROOT / "deploy" / "images"))
import build  # type: ignore[import-not-found]  # a script beside the Dockerfile

TARGETS = ("processor", "worker-cpu")
_REGISTRY = "localhost"
_TAG = "check"
_START_S = 240


def values() -> dict[str, Any]:
    """Return the chart's values for the demo model on a CPU."""
    pool = {"enabled": True, "pools": {"main": {"model": "demo"}}}
    images = {"processor": "processor", "worker": "worker-cpu"}
    return {
        "image": {
            key: {"repository": f"{_REGISTRY}/millstream-{target}", "tag": _TAG}
            for key, target in images.items()
        },
        "models": {"demo": {"uri": "pvc://models/demo"}},
        "poolDefaults": {
            "gpu": {"resource": ""},
            "shm": {"size": "1Gi"},
            "drain": {"preStopSeconds": 1, "limitSeconds": 60},
        },
        "processor": {"replicas": 1, "drain": {"limitSeconds": 60}},
        "prefill": pool,
        "decode": pool,
    }


@dataclass
class ImageCluster(Cluster):
    """A cluster whose containers are those of images."""

    engine: Engine | None = None

    def container(self, name: str, template: Manifest) -> Container:
        """See `Cluster.container`."""
        folder = self.folder / name
        folder.mkdir()
        # Others than root read what is mounted.
        folder.chmod(0o755)
        return ImageContainer(
            pod_name=name,
            template=template,
            objects=self.objects,
            folder=folder,
            ip=pod_address(),
            workers=self.workers_file,
            models=self.models,
            engine=self.engine,
        )


async def check(engine: Engine, folder: Path) -> None:
    """Run the suite, ask, and end it.

    Raises:
        SystemExit: something isn't as it should be.
    """
    models = folder / "models"
    shutil.copytree(ROOT / "demo" / "model", models / "demo")
    manifests = Helm(tool("helm4")).template(values=values())
    async with asyncio.TaskGroup() as tasks:
        made = ImageCluster(folder, models, tasks, engine=engine)
        control = tasks.create_task(made.control())
        try:
            await _run(made, manifests)
        finally:
            for task in (control, *made.lives):
                task.cancel()


async def _run(made: ImageCluster, manifests: Sequence[Manifest]) -> None:
    began = time.monotonic()
    made.apply(manifests)
    try:
        await made.rolled_out(_START_S)
    except AssertionError:
        _fail(made, f"not all pods are ready after {_START_S} s")
    pods = [pod for d in made.deployments.values() for pod in d.pods]
    print(f"{len(pods)} pods passed startup and readiness {time.monotonic() - began:.0f} s after")
    for pod in pods:
        print(f"  {pod.name}: {_confinement(made, pod)}")
    (processor,) = made.pods("processor")
    async with Client(f"{processor.container.ip}:50051") as client:
        chat = client.chat("What is Millstream?", model="demo", max_new_tokens=40, temperature=0)
        answer = await chat.answer()
    print(f"answered through prefill and decode: {answer.text!r}")
    if not answer.text:
        _fail(made, "the answer is empty")
    if restarts := sum(pod.restarts for pod in pods):
        _fail(made, f"containers were restarted {restarts} times")
    made.deployments.clear()  # else others would come in their place
    for pod in pods:
        pod.delete()
    await until(lambda: all(pod.end is not None for pod in pods), 120)
    for pod in pods:
        assert pod.end is not None
        print(f"  {pod.name}: ended with {pod.end.code}, {pod.end.took_s:.1f} s after SIGTERM")
        if pod.end.code or pod.end.killed:
            _fail(made, f"{pod.name} didn't end in good order")


def _confinement(made: ImageCluster, pod: Pod) -> str:
    """Say as what the first process of a container runs, from what the kernel says of it."""
    assert pod.container.process is not None
    for child in _children(pod.container.process.pid):
        status = dict(
            line.split(":\t", 1)
            for line in (child / "status").read_text().splitlines()
            if ":\t" in line
        )
        if status["Uid"].split()[0] != str(USER):
            continue
        capabilities = int(status["CapEff"], 16) | int(status["CapBnd"], 16)
        root = next(
            line.split()[5].split(",")[0]
            for line in (child / "mountinfo").read_text().splitlines()
            if line.split()[4] == "/"
        )
        if capabilities or root != "ro" or status["NoNewPrivs"] != "1":
            _fail(made, f"{pod.name}: capabilities {capabilities:x}, root {root}")
        return f"user {USER}, no capabilities, no new privileges, root {root}"
    return "its process can't be seen from here"


def _children(pid: int) -> list[Path]:
    """List the processes below one, in /proc."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += [Path("/proc", child), *_children(int(child))]
    return found


def _fail(made: ImageCluster, why: str) -> None:
    for deployment in made.deployments.values():
        for pod in [*deployment.pods, *deployment.ended]:
            log = (
                pod.container.log.read_text(encoding="utf-8") if pod.container.log.exists() else ""
            )
            print(f"---- {pod.name}\n{log[-3000:]}", file=sys.stderr)
    raise SystemExit(f"images-check: {why}")


def _engine(builder: str) -> Engine:
    if builder != "buildah":
        return Daemon(builder)
    runtimes = [name for name in ("runc", "crun") if shutil.which(name)]
    if not runtimes:
        raise SystemExit("images-check: buildah runs no services; install runc too")
    return Bundles(runtimes[0])


def main() -> int:
    """Build, run, and print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="Python image; empty: a stand-in made here")
    parser.add_argument("--args", default="", help="further arguments of the builder")
    parser.add_argument("--no-build", action="store_true", help="run what was built last")
    parser.add_argument("--out", type=Path, default=ROOT / ".millstream" / "images")
    given = parser.parse_args()
    builder = build.find_builder()
    names = {target: build.image_name(target, _REGISTRY, _TAG) for target in TARGETS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        if not given.no_build:
            arguments = shlex.split(given.args)
            base = given.base or stand_in.make_base(builder, folder, arguments)
            for target, image in names.items():
                began = time.monotonic()
                build.build(
                    builder, target, image, [f"--build-arg=PYTHON_IMAGE={base}", *arguments]
                )
                print(f"{target}: built in {time.monotonic() - began:.0f} s")
        engine = _engine(builder)
        with (
            contextlib.closing(engine) if isinstance(engine, Bundles) else contextlib.nullcontext()
        ):
            asyncio.run(check(engine, folder))
            given.out.mkdir(parents=True, exist_ok=True)
            for target, image in names.items():
                print(
                    materials.describe(
                        builder, image, engine.root(image), given.out / f"{target}.json"
                    )
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
