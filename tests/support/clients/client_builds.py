"""Toolchains of other languages in tests: a missing one is a skip, and what they build is kept."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_BUILDS = ROOT / ".millstream" / "clients"
_BUILD_LIMIT_S = 200.0


def need(*tools: str | Path) -> None:
    """Skip without these programs or files; fail where CI says that they must be here."""
    missing = [
        str(tool)
        for tool in tools
        if not (tool.exists() if isinstance(tool, Path) else shutil.which(tool))
    ]
    if not missing:
        return
    reason = f"needs {', '.join(missing)}: run `make setup-clients`"
    if os.environ.get("TOOLCHAINS") == "required":
        pytest.fail(reason)
    pytest.skip(reason)


def run(
    command: Sequence[str | Path], folder: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a compiler; a failure shows what it said."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=_BUILD_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def built(name: str, sources: Iterable[Path], build: Callable[[Path], None]) -> Path:
    """Return a folder that ``build`` has filled; the same one as long as the sources are the same.

    ``sources`` are files and folders. A build that fails leaves nothing.
    """
    digest = hashlib.sha256()
    for source in sources:
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file():
                digest.update(f"{path.relative_to(source.parent)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    done = _BUILDS / name / digest.hexdigest()[:16]
    if done.exists():
        return done
    shutil.rmtree(done.parent, ignore_errors=True)  # of older sources
    made = done.with_suffix(".tmp")
    made.mkdir(parents=True)
    build(made)
    made.rename(done)
    return done
