"""Write requirements/*.lock: resolve with pip, in throw-away environments where that's needed.

Run by `make lock`; needs Python's own modules only, and the package index.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
HEADER = "# Written by `make lock`; install with pip install --no-deps -r. See README.md.\n"


def resolve(requirements: list[str]) -> list[str]:
    """Let pip resolve without installing; answers name==version lines."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *requirements]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return [f"{i['metadata']['name']}=={i['metadata']['version']}" for i in report["install"]]


def install_cpu(base: list[str]) -> list[str]:
    """Install the CPU set for real, in its two steps; answers what is there then."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder, "bin", "pip")), "--quiet", "--disable-pip-version-check"]
        dev = PROJECT["dependency-groups"]["dev"]
        first = ["install", "-r", str(HERE / "cpu.in"), *base, *dev]
        subprocess.run([*pip, *first], check=True)
        second = ["install", "--no-deps", "-r", str(HERE / "cpu-nodeps.in")]
        subprocess.run([*pip, *second], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True)
        return frozen.stdout.split()


def write(name: str, lines: list[str]) -> None:
    """Sort, strip local versions (`+cpu`: which build is found is the index's affair), write."""
    pins = sorted({line.split("+")[0] for line in lines}, key=str.lower)
    (HERE / name).write_text(HEADER + "".join(f"{pin}\n" for pin in pins))
    print(f"{name}: {len(pins)} packages")


def main() -> None:
    """Write all three."""
    base = PROJECT["project"]["dependencies"]
    write("processor.lock", resolve(base))
    write("cpu.lock", install_cpu(base))
    write("gpu.lock", resolve([*base, *PROJECT["project"]["optional-dependencies"]["gpu"]]))


if __name__ == "__main__":
    main()
