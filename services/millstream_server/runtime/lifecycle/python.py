"""Which Pythons services run on, unlike the client library and commands; what is installed here."""

from __future__ import annotations

import sys
from importlib.util import find_spec

NEWEST = (3, 12)
"""As pyproject.toml's `services-python` says, which `make setup` reads. SGLang's pins decide it."""


def wrong_python() -> str:
    """Say why services can't run on this Python; empty if they can."""
    if sys.version_info[:2] <= NEWEST:
        return ""
    running = ".".join(map(str, sys.version_info[:3]))
    newest = ".".join(map(str, NEWEST))
    return f"services run on Python 3.11 to {newest}, and this is {running}"


def lacking(*modules: str) -> str:
    """Say which of these can't be imported, and where they are; empty if all can."""
    if not (absent := [name for name in modules if find_spec(name) is None]):
        return ""
    return (
        f"{', '.join(absent)} can't be imported here, which this worker needs. Its image is "
        "millstream-worker, millstream-worker-cpu or, with --engine vllm, millstream-worker-vllm, "
        "not millstream-processor; outside of containers run `make setup`, or pip install "
        "'millstream[gpu]'"
    )
