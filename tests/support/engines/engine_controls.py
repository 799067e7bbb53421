"""An engine's operations, called from the test's process over `engines.engine_process`."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable
from typing import Any

from millstream_server.control.operations import EngineControls


def packed(value: object) -> str:
    """Write a value of plain types for the other process."""
    return base64.b64encode(pickle.dumps(value)).decode()


def unpacked(text: str) -> Any:
    """Read what `packed` has written; both processes are the test's own."""
    return pickle.loads(base64.b64decode(text))  # noqa: S301


async def obey(controls: EngineControls, ability: str, method: str, arguments: Any) -> object:
    """Run an operation; return its result, and for `check_weights` its progress."""
    operation: Callable[..., Any] = getattr(getattr(controls, ability), method)
    if method != "check_weights":
        return await operation(*arguments)
    progress: list[tuple[int, int]] = []
    await operation(*arguments, lambda done, total: progress.append((done, total)))
    return progress
