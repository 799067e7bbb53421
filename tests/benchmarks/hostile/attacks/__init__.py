"""Attacks by name; each is a coroutine that goes on until its time is up."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from tests.benchmarks.hostile.attacks import (
    bodies,
    calls,
    connections,
    controls,
    floods,
    http,
    readers,
    uploads,
)

ATTACKS: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {
    f"{module.__name__.rpartition('.')[2]}.{name}": made
    for module in (bodies, calls, connections, controls, floods, http, readers, uploads)
    for name, made in vars(module).items()
    if not name.startswith("_") and getattr(made, "__module__", "") == module.__name__
}
