# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""Python runs this at the start of every process that has this folder on PYTHONPATH.

It installs the import hook, then runs the `sitecustomize` that it shadows, if there is one.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

import millstream_sglang_cpu_imports


def _run_hidden_one() -> None:
    here = Path(__file__).resolve().parent
    rest = [entry for entry in sys.path if Path(entry or ".").resolve() != here]
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


millstream_sglang_cpu_imports.install()
_run_hidden_one()
