"""Install the project beside what SGLang's image has, and change nothing that SGLang needs.

`python3 install_worker.py gpu.lock WHEELS`, in the image. pip gets a constraint for every package:
the version that is there where it will do, else that of the lock. Afterwards no package may lack
something that it had before.

Needs nothing but Python and pip, which brings `packaging`.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from pip._vendor.packaging.requirements import Requirement

EXTRAS = "processor,cli,s3,gpu"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
ENGINE = re.compile(r"(torch|sglang|sgl|flashinfer|nvidia|cuda|triton|deep)\b.*")
"""Packages built for each other and for the image's CUDA: never replaced."""


def main(lock: Path, wheels: Path) -> int:
    """Install; return the exit code."""
    (wheel,) = wheels.glob("millstream-*.whl")
    before = check()
    there = installed()
    pins, replaced = constraints(there, read_lock(lock), requirements_of(wheel))
    for name, (old, new) in replaced.items():
        print(f"replacing {name} {old} by {new}")
    if engine := sorted(name for name in replaced if ENGINE.fullmatch(name)):
        print(
            f"error: the image's {', '.join(engine)} would have to be replaced. Take the image of "
            "the SGLang release that pyproject.toml names",
            file=sys.stderr,
        )
        return 1
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("".join(f"{name}=={version}\n" for name, version in pins.items()))
        file.flush()
        install = [*PIP, "install", "--no-cache-dir", "--root-user-action=ignore"]
        subprocess.run([*install, "-c", file.name, f"{wheel}[{EXTRAS}]"], check=True)
    if broken := check() - before:
        print(
            "error: the image's packages lack something now:", *broken, sep="\n  ", file=sys.stderr
        )
        return 1
    print(f"added {len(installed().keys() - there.keys())} packages, replaced {len(replaced)}")
    return 0


def constraints(
    there: Mapping[str, str], lock: Mapping[str, str], ours: Iterable[Requirement]
) -> tuple[dict[str, str], dict[str, tuple[str, str]]]:
    """Choose a version of every package.

    Returns:
        versions by name, and of those to replace the old one and the new one.
    """
    pins = {**lock, **there}
    replaced = {}
    for requirement in ours:
        name = canonical(requirement.name)
        old = there.get(name)
        if old is None or requirement.specifier.contains(old.partition("+")[0], prereleases=True):
            continue
        pins[name] = lock[name]
        replaced[name] = (old, lock[name])
    return pins, replaced


def requirements_of(wheel: Path) -> list[Requirement]:
    """Read what the wheel requires, with our extras."""
    with ZipFile(wheel) as file:
        (name,) = (n for n in file.namelist() if n.endswith(".dist-info/METADATA"))
        text = file.read(name).decode()
    every = map(Requirement, re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE))
    return [
        r
        for r in every
        if r.marker is None or any(r.marker.evaluate({"extra": e}) for e in EXTRAS.split(","))
    ]


def read_lock(path: Path) -> dict[str, str]:
    """Read a lock: version by canonical name."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return {canonical(n): v for n, _, v in (line.partition("==") for line in lines if line)}


def installed() -> dict[str, str]:
    """Read which packages are there. With several of a name the first is what Python imports."""
    found: dict[str, str] = {}
    for package in distributions():
        found.setdefault(canonical(package.metadata["Name"]), package.version)
    return found


def check() -> set[str]:
    """List what packages lack, one line each."""
    done = subprocess.run([*PIP, "check"], check=False, capture_output=True, text=True)
    return set(done.stdout.splitlines()) if done.returncode else set()


def canonical(name: str) -> str:
    """Spell a package's name as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
