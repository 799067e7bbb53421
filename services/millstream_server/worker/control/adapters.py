"""LoadLora, UnloadLora and ListLoras: this worker's own list of adapters.

An engine may load an adapter by itself when a request names one that was unloaded; the worker's
list says which names requests may use.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from millstream_server.control.operations import AdapterControl, LoraAdapter
from millstream_server.runtime.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    InvalidRequestError,
    OperationConflictError,
)
from millstream_server.worker.control.directories import AllowedDirectories
from millstream_server.worker.control.operations import Operations
from millstream_server.worker.control.service_stop import Cause, ServiceStop
from millstream_server.worker.control.supported import SupportedControls

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterList:
    """Where the loaded adapters of a worker are known, by name."""

    read: Callable[[], tuple[LoraAdapter, ...]]
    write: Callable[[tuple[LoraAdapter, ...]], None]
    """Tells all who follow the worker's info; requests are checked against it at once."""


class AdapterOperations:
    """Loads and unloads adapters while requests run."""

    def __init__(
        self,
        operations: Operations,
        stop: ServiceStop,
        controls: SupportedControls,
        loaded: AdapterList,
        directories: AllowedDirectories,
    ) -> None:
        """Begin with those in ``loaded``."""
        self._operations = operations
        self._stop = stop
        self._controls = controls
        self._loaded = loaded
        self._directories = directories

    def listed(self) -> tuple[LoraAdapter, ...]:
        """Return the loaded adapters, by name.

        Raises:
            UnsupportedFeatureError: the engine can't load any.
        """
        self._controls.require("ListLoras", lambda c: c.adapters)
        return self._loaded.read()

    async def load(self, name: str, path: str) -> LoraAdapter:
        """Load an adapter.

        Raises:
            InvalidRequestError: the name or the path isn't allowed.
            AdapterExistsError: an adapter of that name is loaded.
            InvalidWeightsError: the files aren't an adapter for this model.
            OperationConflictError: another operation runs, or memory is released.
            UnsupportedFeatureError: the engine can't.
        """
        control: AdapterControl = self._controls.require("LoadLora", lambda c: c.adapters)
        with self._operations.one("LoadLora") as operation:
            _check_name(name)
            if self._find(name) is not None:
                raise AdapterExistsError(
                    f"a LoRA adapter {name} is loaded; unload it first or give another name"
                )
            if self._stop.holds(Cause.MEMORY):
                raise OperationConflictError(
                    "memory of the engine is released; call ResumeMemory first"
                )
            found = await self._directories.resolve("path", path)
            return await operation.apply(self._load(control.load_adapter(name, found)))

    async def unload(self, name: str) -> None:
        """Remove an adapter: no new requests may name it, then the running ones end.

        Raises:
            AdapterNotFoundError: it isn't loaded.
            OperationConflictError: another operation runs.
            UnsupportedFeatureError: the engine can't load any.
        """
        control: AdapterControl = self._controls.require("UnloadLora", lambda c: c.adapters)
        with self._operations.one("UnloadLora") as operation:
            _check_name(name)
            adapter = self._find(name)
            if adapter is None:
                raise AdapterNotFoundError(f"no LoRA adapter {name} is loaded on this worker")
            await operation.apply(self._unload(control, adapter))

    async def _load(self, loading: Coroutine[Any, Any, LoraAdapter]) -> LoraAdapter:
        adapter = await loading
        self._add(adapter)
        return adapter

    async def _unload(self, control: AdapterControl, adapter: LoraAdapter) -> None:
        self._loaded.write(tuple(a for a in self._loaded.read() if a.name != adapter.name))
        try:
            await control.unload_adapter(adapter.name)
        except BaseException:
            self._add(adapter)  # it is still there, and can be unloaded again
            raise

    def _add(self, adapter: LoraAdapter) -> None:
        every = (*self._loaded.read(), adapter)
        self._loaded.write(tuple(sorted(every, key=lambda a: a.name)))

    def _find(self, name: str) -> LoraAdapter | None:
        return next((a for a in self._loaded.read() if a.name == name), None)


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise InvalidRequestError.of(
            "name", "must have 1 to 128 characters: letters, digits and ._- only"
        )
