"""Imports SGLang, whose import changes the process."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from millstream_server.engines.sglang import cpu as sglang_cpu


def import_sglang(name: str, device: str) -> Any:
    """Import a module of SGLang; on the "cpu" with the stand-in.

    The event loop policy, which SGLang replaces, stays ours.
    """
    if device == "cpu":
        sglang_cpu.activate()
    policy = asyncio.get_event_loop_policy()
    try:
        return importlib.import_module(name)
    finally:
        asyncio.set_event_loop_policy(policy)
