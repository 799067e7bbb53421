"""Makes a release: wheel and sdist, images, the chart, bills of materials, checksums.

`make release` runs it. Without a registry nothing leaves this machine, and the chart names images
by tag; with one, images and chart are pushed, and the chart names the images by digest. Needs
nothing but Python, uv, Helm and what builds images.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from build import ROOT, VALUES, BuildError, build, check_targets, find_builder, image_name, version

CHART = ROOT / "deploy" / "helm" / "millstream"
HELM = shutil.which("helm") or str(ROOT / ".venv-deploy" / "bin" / "helm4")
LOCKS = {
    "processor": "processor",
    "worker": "gpu",
    "worker-cpu": "cpu",
    "worker-vllm": "vllm-gpu",
    "worker-vllm-cpu": "vllm-cpu",
}
EMULATORS = {"amd64": "qemu-x86_64", "arm64": "qemu-aarch64"}
"""By architecture, what runs its programs elsewhere."""


def run(*command: object) -> str:
    """Run a command and print it; returns its output.

    Raises:
        BuildError: it failed; it has printed why.
    """
    words = [str(word) for word in command]
    print(f"$ {shlex.join(words)}", flush=True)
    done = subprocess.run(words, check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise BuildError(f"{words[0]} failed; the lines above say why")
    return done.stdout


def architectures(builder: str, target: str) -> list[str]:
    """Return for which an image can be built here; the workers' locks are for one."""
    here = "arm64" if platform.machine() in {"aarch64", "arm64"} else "amd64"
    if target != "processor":
        return [here]
    if builder == "docker":
        known = run("docker", "buildx", "inspect")
        return [arch for arch in EMULATORS if arch == here or f"linux/{arch}" in known]
    emulated = Path("/proc/sys/fs/binfmt_misc")
    return [a for a, name in EMULATORS.items() if a == here or (emulated / name).exists()]


def push(builder: str, target: str, name: str, options: argparse.Namespace) -> str:
    """Build an image for all architectures that can be had, push it; returns its digest."""
    arguments = [*shlex.split(options.args), "--build-arg", f"VERSION={options.version}"]
    found = architectures(builder, target)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "digest")
        if builder == "docker":
            both = ",".join(f"linux/{arch}" for arch in found)
            arguments += ["--platform", both, "--push", "--metadata-file", str(file)]
            build(builder, target, name, arguments)
            return str(json.loads(file.read_text())["containerimage.digest"])
        for arch in found:
            build(builder, target, f"{name}-{arch}", ["--platform", f"linux/{arch}", *arguments])
        subprocess.run([builder, "manifest", "rm", name], check=False, capture_output=True)
        run(builder, "manifest", "create", name, *(f"{name}-{arch}" for arch in found))
        insecure = ["--tls-verify=false"] if options.plain_http else []
        run(
            *(builder, "manifest", "push", "--all", *insecure, "--digestfile", file),
            *(name, f"docker://{name}"),
        )
        return file.read_text().strip()


def chart(out: Path, number: str, images: Mapping[str, str]) -> Path:
    """Package the chart; ``images`` are names with digests, by target, of a place the first."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(CHART, Path(folder, CHART.name))
        text = (copy / "values.yaml").read_text(encoding="utf-8")
        for target, image in reversed(images.items()):
            repository, _, digest = image.partition("@")
            before, place, rest = text.partition(f"\n  {VALUES[target]}:\n")
            rest = re.sub(r"(?<=    repository: )\S+", repository, rest, count=1)
            rest = re.sub(r"(?<=    digest: )\S+", f'"{digest}"', rest, count=1)
            text = before + place + rest
        (copy / "values.yaml").write_text(text, encoding="utf-8")
        run(HELM, "package", copy, "--version", number, "--app-version", number, "-d", out)
    return out / f"{CHART.name}-{number}.tgz"


def bill(target: str, number: str, image: str) -> str:
    """Write a bill of materials (CycloneDX) of an image's Python packages, from its lock."""
    lock = (ROOT / "requirements" / f"{LOCKS[target]}.lock").read_text(encoding="utf-8")
    pins = [line.split("==") for line in lock.splitlines() if "==" in line]
    components = [
        {"type": "library", "name": n, "version": v, "purl": f"pkg:pypi/{n.lower()}@{v}"}
        for n, v in [*pins, ("millstream", number)]
    ]
    about = {"component": {"type": "container", "name": image, "version": number}}
    document = {"bomFormat": "CycloneDX", "specVersion": "1.5", "metadata": about}
    return json.dumps({**document, "components": components}, indent=1) + "\n"


def release(options: argparse.Namespace, targets: Sequence[str], out: Path) -> None:
    """Make everything; images and chart are pushed last of all that can fail here."""
    number, registry = options.version, options.registry
    if number != version():
        raise BuildError(f"VERSION is {number!r}, and pyproject.toml says {version()}")
    if out.exists():
        raise BuildError(f"{out} is there already: remove it to make this release again")
    check_targets(targets)
    builder = find_builder()
    out.mkdir(parents=True)
    constraints = ROOT / "requirements" / "build.lock"
    run("uv", "build", "--build-constraints", constraints, "--out-dir", out, ROOT)
    images = {}
    for target in targets:
        name = image_name(target, registry, number)
        (out / f"millstream-{target}.cdx.json").write_text(bill(target, number, name))
        if registry:
            images[target] = f"{name.rpartition(':')[0]}@{push(builder, target, name, options)}"
        else:
            build(builder, target, name, shlex.split(options.args))
    package = chart(out, number, images)
    (out / "images.txt").write_text("".join(f"{image}\n" for image in images.values()))
    files = sorted(file for file in out.iterdir() if file.name != ".gitignore")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / "SHA256SUMS").write_text("".join(sums))
    if registry:
        insecure = ["--plain-http"] if options.plain_http else []
        print(run(HELM, "push", package, f"oci://{registry}", *insecure))
    print(f"\n{out}:\n{''.join(sums)}")


def main() -> int:
    """Release; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--version", required=True, help="as pyproject.toml says")
    parser.add_argument("--registry", default="", help="where images and chart are pushed")
    parser.add_argument("--targets", default="processor worker", help=", ".join(VALUES))
    parser.add_argument("--args", default="", help="further arguments of the builder")
    parser.add_argument("--out", type=Path, help="folder to make; dist/VERSION unless given")
    parser.add_argument("--plain-http", action="store_true", help="for a registry without TLS")
    options = parser.parse_args()
    out = options.out or ROOT / "dist" / options.version
    try:
        release(options, options.targets.split(), out)
    except BuildError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
