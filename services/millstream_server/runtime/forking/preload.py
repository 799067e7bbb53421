"""What a fork server imports, and what a process that it forks does first."""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Preload:
    """What a fork server imports, and what a process that it forks does first."""

    modules: tuple[str, ...]
    before: Callable[[], None] = _nothing
    """Runs before the modules are imported."""
    after: Callable[[], None] = _nothing
    """Runs after that."""
    in_service: Callable[[], None] = _nothing
    """Runs in a forked process; it has its own environment already."""
    in_spawned: Callable[[], None] | None = None
    """Runs in each process that a forked one starts with multiprocessing's "spawn", likewise.
    None: it starts none, or they are to have a new interpreter."""

    def load(self) -> None:
        """Import all in this process, which has one thread.

        Raises:
            RuntimeError: an import has started a thread. A forked process would lack it, and have
                the locks that it held.
        """
        policy = asyncio.get_event_loop_policy()
        self.before()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SGLang tells what this machine lacks
            for name in self.modules:
                importlib.import_module(name)
        self.after()
        asyncio.set_event_loop_policy(policy)  # SGLang replaces it
        threads = len(list(Path("/proc/self/task").iterdir()))
        if threads != 1:
            raise RuntimeError(f"the imports have started threads: there are {threads}")
        os.register_at_fork(after_in_child=_draw_other_numbers)
        gc.collect()
        gc.freeze()  # the pages stay shared


def _draw_other_numbers() -> None:
    """Seed NumPy's generator; Python does so for its own, and PyTorch's has a fixed seed."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def find(name: str) -> Preload:
    """Return the `Preload` that is called ``name``: "package.module:NAME"."""
    module, _, attribute = name.partition(":")
    found: Preload = getattr(importlib.import_module(module), attribute)
    return found
