"""Builds images with docker, podman or buildah; prints the chart's values for them.

`make images` runs it. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "images" / "Dockerfile"
BUILDERS: Mapping[str, tuple[str, ...]] = {
    "docker": ("build",),
    "podman": ("build", "--format", "docker"),
    # Other formats have no health check.
    # And without layers each target builds the stages that targets share again.
    "buildah": ("build", "--layers", "--format", "docker"),
}
"""In the order in which they are tried."""
VALUES = {
    "processor": "processor",
    "worker": "worker",
    "worker-cpu": "worker",
    "worker-vllm": "workerVllm",
    "worker-vllm-cpu": "workerVllm",
}
"""By target, its place in the chart's `image`."""


class BuildError(Exception):
    """An image can't be built; the text says what to do."""


def find_builder() -> str:
    """Return the first program that works: a docker without its daemon doesn't.

    Raises:
        BuildError: there is none.
    """
    for name in BUILDERS:
        try:
            done = subprocess.run([name, "info"], capture_output=True, check=False)
        except FileNotFoundError:
            continue
        if done.returncode == 0:
            return name
    raise BuildError(
        f"none of {', '.join(BUILDERS)} works here (`docker info` fails where its daemon doesn't "
        "run). Install one, such as Debian's package buildah"
    )


def check_targets(targets: Sequence[str]) -> None:
    """Check that the Dockerfile has these.

    Raises:
        BuildError: it doesn't.
    """
    if unknown := sorted({*targets} - VALUES.keys()):
        raise BuildError(f"there is no target {unknown[0]}; there are {', '.join(VALUES)}")


def version() -> str:
    """Read the project's version, which is the images' tag unless another is given."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def image_name(target: str, registry: str, tag: str) -> str:
    """Name the image of a target."""
    return f"{registry.rstrip('/')}/millstream-{target}:{tag}".lstrip("/")


def build(builder: str, target: str, name: str, arguments: Sequence[str]) -> None:
    """Build one image.

    Raises:
        BuildError: the build failed; it has printed why.
    """
    command = [builder, *BUILDERS[builder], "-f", str(DOCKERFILE), "--target", target, "-t", name]
    command += [*arguments, str(ROOT)]
    print(f"$ {shlex.join(command)}", flush=True)
    if subprocess.run(command, check=False, env={**os.environ, "DOCKER_BUILDKIT": "1"}).returncode:
        raise BuildError(f"{target} wasn't built; the lines above say why")


def values(targets: Sequence[str], registry: str, tag: str) -> str:
    """Write what to tell the chart; of targets for the same place the first."""
    lines: dict[str, str] = {}
    for target in targets:
        repository = image_name(target, registry, tag).rpartition(":")[0]
        line = f'  {VALUES[target]}: {{repository: {repository}, tag: "{tag}"}}'
        lines.setdefault(VALUES[target], line)
    return "\n".join(["image:", *lines.values(), ""])


def main() -> int:
    """Build; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", default="processor worker", help=", ".join(VALUES))
    parser.add_argument("--registry", default="", help="what names of images begin with")
    parser.add_argument("--tag", default="")
    parser.add_argument("--args", default="", help="further arguments of the builder")
    given = parser.parse_args()
    targets, tag = given.targets.split(), given.tag or version()
    names = [image_name(target, given.registry, tag) for target in targets]
    try:
        check_targets(targets)
        builder = find_builder()
        for target, name in zip(targets, names, strict=True):
            build(builder, target, name, shlex.split(given.args))
    except BuildError as error:
        print(f"make images: {error}", file=sys.stderr)
        return 1
    print("\nTo where your nodes can pull from:\n")
    print("\n".join(f"  {builder} push {name}" for name in names))
    print("\nFor every helm command, in a file that it gets with -f:\n")
    print(values(targets, given.registry, tag))
    return 0


if __name__ == "__main__":
    sys.exit(main())
