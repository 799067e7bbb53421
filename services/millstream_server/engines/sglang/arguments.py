"""SGLang's own arguments, as its own command line reads them.

SGLang is imported only when there are arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from millstream_server.engines.sglang import cpu as sglang_cpu


@contextlib.contextmanager
def importing(*, on_cpu: bool) -> Iterator[None]:
    """Prepare for the import of SGLang, and restore the event loop policy that it may replace."""
    if on_cpu:
        sglang_cpu.activate()
    policy = asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)


def server_arguments(parser: argparse.ArgumentParser, *, on_cpu: bool) -> Mapping[str, str]:
    """Add the arguments of SGLang's engine for text and vectors."""
    with importing(on_cpu=on_cpu):
        module: Any = importlib.import_module("sglang.srt.server_args")
    module.ServerArgs.add_cli_args(parser)
    return {}
