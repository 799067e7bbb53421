"""Functions of SGLang's modules that are replaced while it starts or stops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Callable[..., None]) -> Iterator[None]:
    """Replace a function of ``module`` during the ``with`` block."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def keep_our_logging(*_args: object, **_options: object) -> None:
    """Take the place of SGLang's `configure_logger`, which replaces the root logger's handlers."""
