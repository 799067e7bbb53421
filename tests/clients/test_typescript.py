"""The example client in TypeScript, on the package as `npm pack` makes it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, built, need, run
from tests.support.clients.client_checks import ExampleChecks

_PACKAGE = ROOT / "generated" / "typescript"
_EXAMPLE = Path(__file__).with_name("typescript")
_INSTALLED = _PACKAGE / "node_modules"


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
        sources = [_EXAMPLE, _PACKAGE / "package-lock.json", _PACKAGE / "package.json"]
        folder = built("typescript", [*sources, _PACKAGE / "src"], _build)
        return ["node", str(folder / "example.js")]
