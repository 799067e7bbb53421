"""Which workers can take a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millstream_server.engines.base import EngineInfo
from millstream_server.runtime.errors import InvalidRequestError


class Fit:
    """Checks one request against workers' infos; equal infos once.

    It is the filter of `TaskWorkers.pick` (`routing.task_workers`), also for workers that connect
    later.
    """

    def __init__(self, check: Callable[[EngineInfo], object]) -> None:
        """``check`` raises InvalidRequestError if an engine can't take the request."""
        self._check = check
        self._errors: dict[EngineInfo, InvalidRequestError | None] = {}

    def __call__(self, engine: EngineInfo) -> bool:
        """Return whether an engine can take the request."""
        return self._error(engine) is None

    def require(self, engines: Iterable[EngineInfo]) -> None:
        """Check that one of them can take the request.

        Raises:
            InvalidRequestError: none can; it says what the first one can't.
        """
        errors = []
        for engine in engines:
            if (error := self._error(engine)) is None:
                return
            errors.append(error)
        if errors:
            raise errors[0]

    def _error(self, engine: EngineInfo) -> InvalidRequestError | None:
        if engine not in self._errors:
            try:
                self._check(engine)
            except InvalidRequestError as error:
                self._errors[engine] = error
            else:
                self._errors[engine] = None
        return self._errors[engine]
