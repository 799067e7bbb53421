"""Which directories of a worker an operator may name."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from millstream_server.runtime.errors import InvalidRequestError

_SETTING = "--weights-dirs"


class AllowedDirectories:
    """Paths below some directories; symbolic links are followed first."""

    def __init__(self, directories: Iterable[Path]) -> None:
        """Allow these directories and all below them."""
        self._directories = tuple(directories)

    @classmethod
    def of_model(cls, directories: Iterable[Path], model_path: Path | None) -> AllowedDirectories:
        """Allow ``directories`` and the model's own; without any, also those beside the model's.

        The model's own is always allowed, so that an operator can go back to its first weights.
        Where it is in the root directory, as in a container, it is allowed alone.
        """
        given = tuple(directories)
        if model_path is None:
            return cls(given)
        model = model_path.resolve()
        if given:
            return cls((*given, model))
        beside = model.parent
        return cls((model if beside == beside.parent else beside,))

    async def resolve(self, field: str, text: str) -> Path:
        """Return the directory that a caller names.

        Raises:
            InvalidRequestError: it isn't below one of them. The error doesn't say what exists.
        """
        if not text.startswith("/"):
            raise InvalidRequestError.of(field, "must be an absolute path on the worker's machine")
        found = await asyncio.to_thread(self._resolve, text)
        if found is None:
            raise InvalidRequestError.of(
                field, f"must be below a directory that the worker's {_SETTING} allows"
            )
        return found

    def _resolve(self, text: str) -> Path | None:
        try:
            found = Path(text).resolve()
            allowed = any(found.is_relative_to(d.resolve()) for d in self._directories)
        except (OSError, RuntimeError, ValueError):  # a loop of links, a NUL character
            return None
        return found if allowed else None
