"""The methods of a server, as the generated `add_…Servicer_to_server` functions give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any, TypeAlias

from millstream_server.runtime.rpc.serving import Handler, Method, Rpcs

ServicerTable: TypeAlias = Any
"""What the generated `add_…Servicer_to_server` functions take: a grpc.aio server, or anything with
the two methods of `MethodTable` that they call."""


class MethodTable:
    """Finds what serves a path. Servicers are added as to a grpc.aio server."""

    def __init__(self, rpcs: Rpcs) -> None:
        """Serve with the layers of ``rpcs``."""
        self._rpcs = rpcs
        self._handlers: dict[str, Handler] = {}
        self._generic: list[Any] = []
        self._methods: dict[str, Method] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Handler]) -> None:
        """Add a service's methods by their short names."""
        for name, handler in handlers.items():
            self._handlers[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """Add `grpc.GenericRpcHandler`s, which are asked for methods that aren't registered."""
        self._generic += handlers

    def find(self, path: str) -> Method:
        """Return what serves the calls of a path; also for a method that isn't there."""
        method = self._methods.get(path)
        if method is not None:
            return method
        handler = self._handlers.get(path) or self._ask(path)
        method = self._rpcs.method(path, handler)
        if handler is not None:  # callers can invent any number of others
            self._methods[path] = method
        return method

    def _ask(self, path: str) -> Handler | None:
        details = SimpleNamespace(method=path, invocation_metadata=())
        found = (handler.service(details) for handler in self._generic)
        return next((handler for handler in found if handler is not None), None)
