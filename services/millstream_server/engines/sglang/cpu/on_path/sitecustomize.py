# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
"""Python runs this at the start of every process that has this folder on PYTHONPATH.

It installs the import hook, then runs the `sitecustomize` that it shadows, if there is one.
"""

from __future__ import annotations

from pathlib import Path

import millstream_sglang_cpu_imports

from millstream_server.engines.torch_on_cpu import run_shadowed_sitecustomize

millstream_sglang_cpu_imports.install()
run_shadowed_sitecustomize(Path(__file__).resolve().parent)
