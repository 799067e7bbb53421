"""A server that speaks as much of S3's HTTP API as a download needs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

from aiohttp import web

from tests.support.processes.ports import free_port

BUCKET = "models"
DENIED = "secrets"


@dataclass
class S3Server:
    """One bucket, listed two objects at a time."""

    objects: dict[str, bytes]
    truncate: dict[str, int] = field(default_factory=dict)
    """Cut an object's next so many responses in the middle."""
    etags: dict[str, str] = field(default_factory=dict)
    """Entity tags that aren't digests, by object."""
    asked: Counter[str] = field(default_factory=Counter)
    """Requests for content by key and start."""
    port: int = field(default_factory=free_port)

    @property
    def environment(self) -> dict[str, str]:
        """What boto3 reads to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "eu-central-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[S3Server]:
        app = web.Application()
        app.router.add_get("/{bucket}", self._list)
        app.router.add_get("/{bucket}/{key:.+}", self._get)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", self.port).start()
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _list(self, request: web.Request) -> web.Response:
        if request.match_info["bucket"] == DENIED:
            return _error(403, "AccessDenied")
        if request.match_info["bucket"] != BUCKET:
            return _error(404, "NoSuchBucket")
        query = request.query
        names = sorted(name for name in self.objects if name.startswith(query["prefix"]))
        start = int(query.get("continuation-token", "0"))
        page, more = names[start : start + 2], len(names) > start + 2
        contents = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(self.objects[name])}</Size>"
            f"<ETag>&quot;{self._etag(name)}&quot;</ETag></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{start + 2}</NextContinuationToken>" if more else ""
        text = (
            '<?xml version="1.0"?>'
            '<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{contents}</ListBucketResult>"
        )
        return web.Response(text=text, content_type="application/xml")

    def _etag(self, name: str) -> str:
        if name in self.etags:
            return self.etags[name]
        return hashlib.md5(self.objects[name], usedforsecurity=False).hexdigest()

    async def _get(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["key"]
        if name not in self.objects:
            return _error(404, "NoSuchKey")
        if request.headers.get("If-Match") != f'"{self._etag(name)}"':
            return _error(412, "PreconditionFailed")
        content, start = self.objects[name], request.http_range.start or 0
        self.asked[f"{name}@{start}"] += 1
        rest = content[start:]
        told = {
            "Content-Length": str(len(rest)),
            "Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}",
            "ETag": f'"{self._etag(name)}"',
        }
        response = web.StreamResponse(status=206, headers=told)
        await response.prepare(request)
        if self.truncate.get(name, 0):
            self.truncate[name] -= 1
            await response.write(rest[: len(rest) // 2])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(rest)
        return response


def _error(status: int, code: str) -> web.Response:
    text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>no</Message></Error>"
    return web.Response(status=status, text=text, content_type="application/xml")
