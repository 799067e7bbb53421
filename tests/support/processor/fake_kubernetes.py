"""A Kubernetes API server that knows EndpointSlices only, over real HTTP with chunked watches.

Events are kept, so a watch gets those that came after its resource version, as from a real server.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from tests.support.processes.ports import free_port

NAMESPACE = "shop"
SERVICE = "workers"
LABEL = "kubernetes.io/service-name"


def endpoint(address: str, pod: str = "", **conditions: bool | None) -> dict[str, Any]:
    """Make one; without conditions these are unknown."""
    found: dict[str, Any] = {"addresses": [address]}
    if conditions:
        found["conditions"] = conditions
    if pod:
        found["targetRef"] = {"kind": "Pod", "name": pod, "uid": f"uid-{pod}"}
    return found


def endpoint_slice(
    name: str,
    *endpoints: dict[str, Any],
    ports: Sequence[dict[str, Any]] | None = None,
    family: str = "IPv4",
    service: str = SERVICE,
) -> dict[str, Any]:
    """Make one; its port is named grpc unless told otherwise."""
    return {
        "metadata": {"name": name, "labels": {LABEL: service}},
        "addressType": family,
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "grpc", "port": 50051, "protocol": "TCP"}] if ports is None else ports,
    }


class FakeApiServer:
    """Serves the slices of one namespace; a list has those of its service, a watch all."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.port = free_port()
        self.tls = tls
        self.token = "a-token"  # noqa: S105 - it opens nothing
        self.refused: dict[str, int] = {}
        """HTTP statuses by verb: list, watch."""
        self.raw_list: str | None = None
        """Sent instead of a list."""
        self.lists = 0
        self.watches = 0
        self.watched_from: list[int] = []
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._kept_from = 100
        self._events: list[tuple[int, str]] = []
        self._watchers: set[asyncio.Queue[str | None]] = set()
        self._transports: set[asyncio.Transport] = set()
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def watching(self) -> int:
        return len(self._watchers)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get(
            f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices", self._get
        )
        self._runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls).start()

    async def stop(self) -> None:
        self.end_watches()
        self.disconnect()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def kubeconfig(self, file: Path) -> Path:
        """Write one that leads here; JSON is YAML."""
        content = {
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": self.token}}],
            "contexts": [
                {
                    "name": "here",
                    "context": {"cluster": "fake", "user": "me", "namespace": NAMESPACE},
                }
            ],
            "current-context": "here",
        }
        file.write_text(json.dumps(content))
        return file

    # ---- what happens in the cluster

    def put(self, changed: dict[str, Any]) -> None:
        """Add or change a slice."""
        name = changed["metadata"]["name"]
        self._happen("MODIFIED" if name in self._slices else "ADDED", changed)
        self._slices[name] = changed

    def delete(self, name: str) -> None:
        self._happen("DELETED", self._slices.pop(name))

    def bookmark(self) -> None:
        self._happen("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}})

    def forget_events(self) -> None:
        """Let a watch from before now fail with 410, as after a compaction; ends all watches."""
        self._version += 1
        self._kept_from = self._version
        self._events.clear()
        self.end_watches()

    def _happen(self, kind: str, changed: dict[str, Any]) -> None:
        self._version += 1
        changed["metadata"]["resourceVersion"] = str(self._version)
        line = json.dumps({"type": kind, "object": changed}) + "\n"
        self._events.append((self._version, line))
        self.send(line)

    # ---- what happens to watches

    def send(self, line: str) -> None:
        """Send text to all watches."""
        for watcher in self._watchers:
            watcher.put_nowait(line)

    def end_watches(self) -> None:
        """End them in good order, as after their time."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def disconnect(self) -> None:
        """Reset all connections."""
        for transport in self._transports:
            transport.abort()

    # ---- HTTP

    async def _get(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch") else "list"
        if verb == "watch":
            self.watches += 1
        else:
            self.lists += 1
        if request.headers.get("Authorization", "").lower() != f"bearer {self.token}":
            return _status(401, "Unauthorized")
        if verb in self.refused:
            return _status(self.refused[verb], "refused by the test")
        label, _, service = request.query["labelSelector"].partition("=")
        assert label == LABEL
        return await self._watch(request) if verb == "watch" else self._list(service)

    def _list(self, service: str) -> web.Response:
        if self.raw_list is not None:
            return web.Response(text=self.raw_list)
        content = {
            "kind": "EndpointSliceList",
            "metadata": {"resourceVersion": str(self._version)},
            "items": [
                one for one in self._slices.values() if one["metadata"]["labels"][LABEL] == service
            ],
        }
        return web.json_response(content)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        version = int(request.query["resourceVersion"])
        self.watched_from.append(version)
        response = web.StreamResponse()
        await response.prepare(request)
        if version < self._kept_from:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        watcher: asyncio.Queue[str | None] = asyncio.Queue()
        for when, line in self._events:
            if when > version:
                watcher.put_nowait(line)
        transport: Any = request.transport
        self._watchers.add(watcher)
        self._transports.add(transport)
        try:
            while (next_line := await watcher.get()) is not None:
                await response.write(next_line.encode())
        finally:
            self._watchers.discard(watcher)
            self._transports.discard(transport)
        return response


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "code": code, "message": message}, status=code)
