"""What each install brings: the base install is the client, extras add the rest."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from millstream_server.cli import machine
from millstream_server.cli.main import main
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.lifecycle import main as service

ROOT = Path(__file__).parents[2]
STUBS = ROOT / "generated" / "python" / "millstream" / "v1"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
BASE: list[str] = PROJECT["dependencies"]
CLI: list[str] = PROJECT["optional-dependencies"]["cli"]

_ONLY = """
import sys

class Only:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {allowed!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Only())
sys.argv = ["millstream", "--version"]
{code}
"""


def _installed(requirements: list[str]) -> set[str]:
    """Name the packages that pip installs for these requirements."""
    found: set[str] = set()
    waiting = [Requirement(line) for line in requirements]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found:
            found.add(name)
            waiting += map(Requirement, distribution(name).requires or ())
    return found


def _run_with(requirements: list[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code that can import these requirements, ours and Python's own modules alone."""
    brought = _installed(requirements)
    allowed = {
        module
        for module, names in packages_distributions().items()
        if brought & set(map(canonicalize_name, names))
    }
    allowed |= {"millstream", "millstream_client", "millstream_server"}
    allowed |= set(sys.stdlib_module_names)
    script = _ONLY.format(allowed=allowed, code=code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)  # noqa: PLW1510


def test_the_base_install_is_small() -> None:
    assert _installed(BASE) == {
        "grpcio",
        "grpcio-health-checking",
        "googleapis-common-protos",
        "protobuf",
        "typing-extensions",
    }


@pytest.mark.parametrize(
    ("files", "pattern", "name"),
    [
        ("*_pb2_grpc.py", r"GRPC_GENERATED_VERSION = '([\d.]+)'", "grpcio"),
        ("*_pb2.py", r"Protobuf Python Version: ([\d.]+)", "protobuf"),
    ],
)
def test_the_base_install_takes_what_the_stubs_take(files: str, pattern: str, name: str) -> None:
    (specifier,) = (r.specifier for r in map(Requirement, BASE) if r.name == name)
    generated = {v for file in STUBS.glob(files) for v in re.findall(pattern, file.read_text())}
    (oldest,) = generated
    major, minor, *_ = map(int, oldest.split("."))
    newest_major = int(version(name).partition(".")[0])
    assert specifier.contains(oldest)
    assert not specifier.contains(f"{major}.{minor - 1}.9")  # the stubs refuse it
    assert specifier.contains(f"{newest_major}.999.0")
    # protobuf promises to run the stubs of the generation before, and no older ones.
    assert newest_major - major <= 1
    assert not specifier.contains(f"{newest_major + 1}.0.0")


def test_the_client_needs_the_base_install_alone() -> None:
    code = "import millstream_client.service_config, millstream.v1.processor_pb2_grpc"
    done = _run_with(BASE, code)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_line_needs_its_extra_alone() -> None:
    done = _run_with([*BASE, *CLI], "from millstream_server.cli.entry import main; main()")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"millstream \S+\n", done.stdout)


@pytest.mark.parametrize(
    ("command", "says"),
    [("health", "127.0.0.1:1: can't be reached: "), ("check", "✗ connection: 127.0.0.1:1 can't")],
)
def test_what_runs_in_images_needs_the_base_install_alone(command: str, says: str) -> None:
    done = _run_with(
        BASE,
        f"sys.argv[1:] = ['{command}', '127.0.0.1:1']\n"
        "from millstream_server.cli.entry import main; exit(main())",
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(says)


# Only `completion` needs shtab, and says so.
@pytest.mark.parametrize("missing", [line for line in CLI if not line.startswith("shtab")])
def test_without_its_extra_the_command_line_says_what_to_install(missing: str) -> None:
    others = [line for line in CLI if line != missing]
    done = _run_with(
        [*BASE, *others],
        "sys.argv[1:] = ['completion', 'bash']\n"
        "from millstream_server.cli.entry import main; exit(main())",
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "error: the millstream command needs further packages: pip install 'millstream[cli]'\n"
    )


def test_up_without_the_services_packages_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["grpcio>=1.85", "surely-not-installed>=1; extra == 'processor'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    assert main(["up", "--engine", "simulated"]) == 1
    assert capsys.readouterr().err == (
        "error: the services need surely-not-installed: pip install 'millstream[cli,processor]'\n"
    )


def _on_python(monkeypatch: pytest.MonkeyPatch, *version: int) -> None:
    monkeypatch.setattr(sys, "version_info", version)


def test_the_base_install_takes_pythons_that_services_do_not() -> None:
    base = SpecifierSet(PROJECT["requires-python"])
    assert [minor for minor in range(20) if base.contains(f"3.{minor}.9")] == [11, 12, 13, 14]
    assert PYPROJECT["tool"]["millstream"]["services-python"] == ">=3.11,<3.13"


def test_services_say_which_python_they_need(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "services run on Python 3.11 to 3.12, and this is 3.13.1"
    _on_python(monkeypatch, 3, 13, 1)
    with pytest.raises(SystemExit) as ended:
        service.main(ProcessorSettings, _never, prog="millstream-processor", description="")
    assert ended.value.code == f"millstream-processor: {why}"
    assert main(["up", "--engine", "simulated"]) == 1
    assert capsys.readouterr().err == f"error: {why}\n"
    assert machine.python().what == why
    _on_python(monkeypatch, 3, 12, 9)
    assert machine.python() == machine.ok("Python 3.12.9")


async def _never(_settings: ProcessorSettings) -> int:
    raise AssertionError


def test_type_checkers_may_read_every_package() -> None:
    packages = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for package in map(ROOT.joinpath, packages):
        # `millstream` is a namespace: its parts are marked (PEP 561).
        parts = [package] if (package / "__init__.py").exists() else list(package.iterdir())
        assert parts
        for part in parts:
            assert (part / "py.typed").exists(), part


def test_the_entry_point_is_the_one_tested() -> None:
    assert PROJECT["scripts"] == {"millstream": "millstream_server.cli.entry:main"}
