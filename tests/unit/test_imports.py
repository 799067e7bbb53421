"""What a process must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SCRIPT = """
import sys
import {module}
print(*sorted(sys.modules.keys() & {{"torch", "sglang", "kubernetes"}}))
"""


def _loaded_by(module: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT.format(module=module)],
        check=True,
        capture_output=True,
        text=True,
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "millstream_server.processor.app",
        "millstream_server.worker.app",
        "millstream_server.cli.main",
        "millstream_server.embedding.worker.app",
    ],
)
def test_a_process_without_an_engine_loads_no_library_that_it_may_not_need(module: str) -> None:
    """Engines' take ten seconds and a gigabyte, and a Processor's container doesn't have them.

    That of Kubernetes takes 24 MB and a quarter of a second.
    """
    assert not _loaded_by(module)


@pytest.mark.parametrize("service", ["decode", "prefill", "encode", "diffusion", "embedding"])
def test_what_an_engine_spawns_does_not_load_the_service(service: str) -> None:
    """It imports the main module by another name: a second of a CPU for each process of SGLang."""
    script = f"import sys, millstream_server.{service}.__main__; print('grpc' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout == "False\n"
