"""The example client in TypeScript, on the package as `npm pack` makes it."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks
from tests.support.clients.tool_checks import check_tool_loop

_PACKAGE = ROOT / "generated" / "typescript"
_EXAMPLE = Path(__file__).with_name("typescript")
_INSTALLED = _PACKAGE / "node_modules"
_SOURCES = [
    _EXAMPLE,
    _PACKAGE / "package-lock.json",
    _PACKAGE / "package.json",
    _PACKAGE / "src",
]
_OLDEST = {
    "@grpc/grpc-js": "1.13.4",
    "@bufbuild/protobuf": "2.2.0",
    "typescript": "5.0.4",
    "@types/node": "20.10.0",
}
"""What docs/clients/typescript.md says; the peers are the lower bounds of package.json."""

# Ten seconds on two idle cores; on busy ones more, and npm downloads.
pytestmark = pytest.mark.timeout(240)


def _build(folder: Path) -> None:
    """Install the package from its archive, as npm would, but without a network."""
    modules = folder / "node_modules"
    shutil.copytree(_EXAMPLE, folder, dirs_exist_ok=True)
    run(["npm", "pack", "--pack-destination", folder], _PACKAGE)
    (archive,) = folder.glob("*.tgz")
    shutil.unpack_archive(archive, modules)
    (modules / "@millstream").mkdir()
    (modules / "package").rename(modules / "@millstream" / "grpc")
    for package in _INSTALLED.iterdir():
        (modules / package.name).symlink_to(package)
    run([modules / ".bin" / "tsc", "-p", folder], folder)


class TestTypeScript(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls) -> list[str]:
        need("node", "npm", _INSTALLED)
        return ["node", str(built("typescript", _SOURCES, _build) / "example.js")]


def test_the_tool_loop() -> None:
    need("node", "npm", _INSTALLED)
    check_tool_loop(["node", str(built("typescript", _SOURCES, _build) / "tools.js")])


def _build_oldest(folder: Path) -> None:
    """Install the archive into a fresh project with other versions of what it needs."""
    run(["npm", "pack", "--pack-destination", folder], _PACKAGE)
    (archive,) = folder.glob("*.tgz")
    for name in ("example.ts", "tools.ts", "tsconfig.json"):
        shutil.copy(_EXAMPLE / name, folder)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    others = [f"{name}@{version}" for name, version in _OLDEST.items()]
    quiet = ["--no-audit", "--no-fund", "--silent", "--save-exact"]
    run(["npm", "install", *quiet, archive, *others], folder)
    run([folder / "node_modules" / ".bin" / "tsc", "-p", folder], folder)


class TestOldestVersions(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def project(cls) -> Path:
        need("node", "npm", _INSTALLED)
        probe = ["npm", "view", "@grpc/grpc-js", "name"]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            need("a package registry that npm reaches")
        return built("typescript-oldest", [*_SOURCES, Path(__file__)], _build_oldest)

    @pytest.fixture(scope="class")
    @classmethod
    def command(cls, project: Path) -> list[str]:
        return ["node", str(project / "example.js")]

    def test_the_project_has_its_own_versions_and_no_second_copy(self, project: Path) -> None:
        modules = project / "node_modules"
        found = {
            name: json.loads((modules / name / "package.json").read_text())["version"]
            for name in _OLDEST
        }
        assert found == _OLDEST
        assert not (modules / "@millstream" / "grpc" / "node_modules").exists()

    def test_the_archive_has_the_licence(self, project: Path) -> None:
        licence = project / "node_modules" / "@millstream" / "grpc" / "LICENSE"
        assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()

    def test_commonjs_may_load_it(self, project: Path) -> None:
        script = 'import("@millstream/grpc").then((found) => console.log(found.ChatRole.USER))'
        program = project / "program.cjs"
        program.write_text(script)
        assert run(["node", program], project).stdout == "3\n"


def test_the_oldest_versions_are_those_that_the_package_states() -> None:
    package = json.loads((_PACKAGE / "package.json").read_text())
    assert "dependencies" not in package  # else a project gets a second grpc-js
    peers = package["peerDependencies"]
    assert peers == {name: f"^{_OLDEST[name]}" for name in peers}
    page = (ROOT / "docs" / "clients" / "typescript.md").read_text()
    for stated in ("Node.js 20", "grpc-js 1.13", "TypeScript 5.0", "protobuf` 2.2"):
        assert stated in page
