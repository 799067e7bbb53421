"""Which Pythons services run on; the client library and the command line run on newer ones too."""

from __future__ import annotations

import sys

NEWEST = (3, 12)
"""As pyproject.toml's `services-python` says, which `make setup` reads. SGLang's pins decide it."""


def wrong_python() -> str:
    """Say why services can't run on this Python; empty if they can."""
    if sys.version_info[:2] <= NEWEST:
        return ""
    running = ".".join(map(str, sys.version_info[:3]))
    newest = ".".join(map(str, NEWEST))
    return f"services run on Python 3.11 to {newest}, and this is {running}"
