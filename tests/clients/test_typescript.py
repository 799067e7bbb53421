"""The example client in TypeScript, on the package as `npm pack` makes it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.client_checks import ExampleChecks

_ROOT = Path(__file__).parents[2]
_PACKAGE = _ROOT / "generated" / "typescript"
_EXAMPLE = Path(__file__).with_name("typescript")
_INSTALLED = _PACKAGE / "node_modules"


def _packed(folder: Path) -> Path:
    subprocess.run(
        ["npm", "pack", "--silent", "--pack-destination", folder],
        cwd=_PACKAGE,
        check=True,
        timeout=60,
    )
    (packed,) = folder.glob("*.tgz")
    return packed


class TestTypeScript(ExampleChecks):
    @pytest.fixture(scope="class")
    @classmethod
    def command(cls, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
        missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
        if missing or not _INSTALLED.exists():
            pytest.skip(f"needs {', '.join(missing) or _INSTALLED}: run `make setup-clients`")
        folder = tmp_path_factory.mktemp("typescript")
        modules = folder / "node_modules"
        shutil.copytree(_EXAMPLE, folder, dirs_exist_ok=True)
        shutil.unpack_archive(_packed(folder), modules)
        (modules / "@millstream").mkdir()
        (modules / "package").rename(modules / "@millstream" / "grpc")
        for package in _INSTALLED.iterdir():
            (modules / package.name).symlink_to(package)
        compiler = modules / ".bin" / "tsc"
        subprocess.run([compiler, "-p", folder], check=True, timeout=60)
        return ["node", str(folder / "example.js")]
