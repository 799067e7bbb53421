"""A server that speaks as much of the Hugging Face Hub's HTTP API as a download needs."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from aiohttp import web

from tests.support.processes.ports import free_port

COMMIT = "c" * 40
REPO = "org/tiny"
GATED = "org/gated"
TOKEN = "hf_right"  # noqa: S105 - of no account


@dataclass
class HubServer:
    """One repository; a gated one beside it. Big files are redirected to another host name."""

    files: dict[str, bytes]
    truncate: dict[str, int] = field(default_factory=dict)
    """Cut a file's next so many responses in the middle."""
    lie_about: set[str] = field(default_factory=set)
    """Files whose listed hash isn't their content's."""
    hold: set[str] = field(default_factory=set)
    """Files that never end."""
    holding: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when half of such a file was sent."""
    siblings: object = None
    """What is listed instead of the files."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests for content by file; ranges with their start."""
    cdn_headers: list[Mapping[str, str]] = field(default_factory=list)
    port: int = field(default_factory=free_port)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[HubServer]:
        app = web.Application()
        app.router.add_get("/api/models/{org}/{name}", self._info)
        app.router.add_get("/api/models/{org}/{name}/revision/{revision}", self._info)
        app.router.add_get("/{org}/{name}/resolve/{revision}/{file:.+}", self._resolve)
        app.router.add_get("/cdn/{file:.+}", self._content)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _info(self, request: web.Request) -> web.Response:
        repo = f"{request.match_info['org']}/{request.match_info['name']}"
        given = request.headers.get("Authorization", "")
        if repo == GATED and given != f"Bearer {TOKEN}":
            return _error(403 if given else 401, "GatedRepo")
        if repo not in (REPO, GATED):
            return _error(404, "RepoNotFound")
        if request.match_info.get("revision", "main") not in ("main", "v1", COMMIT):
            return _error(404, "RevisionNotFound")
        siblings = self.siblings or [self._sibling(name) for name in self.files]
        return web.json_response({"id": repo, "sha": COMMIT, "siblings": siblings})

    def _sibling(self, name: str) -> dict[str, object]:
        size = len(self.files[name])
        about: dict[str, object] = {"rfilename": name, "size": size, "blobId": self._etag(name)}
        if _is_big(name):
            about["lfs"] = {"sha256": self._etag(name), "size": size, "pointerSize": 130}
        return about

    def _etag(self, name: str) -> str:
        content = self.files[name] + (b"?" if name in self.lie_about else b"")
        if _is_big(name):
            return hashlib.sha256(content).hexdigest()
        blob = b"blob %d\0" % len(content) + content
        return hashlib.sha1(blob, usedforsecurity=False).hexdigest()

    async def _resolve(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["file"]
        if name not in self.files:
            return _error(404, "EntryNotFound")
        about = {"X-Repo-Commit": COMMIT, "ETag": f'"{self._etag(name)}"'}
        if not _is_big(name):
            return await self._send(request, name, about)
        about |= {
            "X-Linked-Etag": f'"{self._etag(name)}"',
            "X-Linked-Size": str(len(self.files[name])),
            "Location": f"http://localhost:{self.port}/cdn/{name}",
        }
        return web.Response(status=302, headers=about)

    async def _content(self, request: web.Request) -> web.StreamResponse:
        self.cdn_headers.append(request.headers.copy())
        return await self._send(request, request.match_info["file"], {})

    async def _send(
        self, request: web.Request, name: str, headers: Mapping[str, str]
    ) -> web.StreamResponse:
        content, start = self.files[name], request.http_range.start or 0
        if request.method == "GET":
            self.asked[f"{name}@{start}" if start else name] += 1
        told = {**headers, "Content-Length": str(len(content) - start)}
        if start:
            told["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        response = web.StreamResponse(status=206 if start else 200, headers=told)
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        if self.truncate.get(name, 0) or name in self.hold:
            await response.write(content[start : start + len(content) // 2])
            if name in self.hold:
                self.holding.set()
                await asyncio.Event().wait()  # until the server stops
            self.truncate[name] -= 1
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(content[start:])
        return response


def _is_big(name: str) -> bool:
    return PurePosixPath(name).suffix in (".safetensors", ".bin")


def _error(status: int, code: str) -> web.Response:
    return web.Response(status=status, headers={"X-Error-Code": code})
