"""The links to all discovered workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection

from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.diffusion_rpc import DiffusionCall
from millstream_server.links.embed_rpc import EmbedCall
from millstream_server.links.encode_stream import Encoding
from millstream_server.links.link import WorkerLink
from millstream_server.links.unread import UnreadOutput
from millstream_server.links.worker_calls import WorkerCalls
from millstream_server.media.file import MediaFile
from millstream_server.routing.discovery.base import Discovery, follow
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import Tracing
from millstream_server.synthesis.request import DiffusionRequest
from millstream_server.vectors.output import Ranking
from millstream_server.vectors.request import EmbedRequest, RerankRequest

log = get_log(__name__)

Link = WorkerLink[WorkerCalls]


class Fleet:
    """Keeps a link to every discovered worker, and adds its view to the router.

    A worker that is no longer discovered gets no new requests; its link closes when its open
    requests have ended. If it is discovered again before, it gets a second link.
    """

    def __init__(
        self,
        discovery: Discovery,
        router: Router,
        *,
        tls: ClientTls | None = None,
        tracing: Tracing | None = None,
        unread: UnreadOutput | None = None,
    ) -> None:
        """Prepare; `open` starts to connect. ``unread`` bounds the output that clients don't read.

        Without one the bound is 512 MiB.
        """
        self.unread = unread or UnreadOutput()
        """Bounds the output of all requests that clients have not read."""
        self._discovery = discovery
        self._router = router
        self._tls = tls
        self._tracing = tracing
        self._links: dict[str, Link] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Start connecting."""
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Disconnect; requests still open fail."""
        for link in self._links.values():
            link.close()
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def generate(
        self, address: str, request: GenerationRequest, sink: OutputSink
    ) -> Callable[[], None]:
        """Start a request on the worker at ``address``; see `GenerationStream.start`.

        Raises:
            WorkerLostError: the worker accepts no requests now.
        """
        return self._require(address).generate(request, sink)

    def encode(self, address: str, file: MediaFile) -> Encoding:
        """Start to encode a file on the worker at ``address``; see `EncodeStream.start`.

        Raises:
            WorkerLostError: the worker accepts no requests now.
        """
        return self._require(address).encode(file)

    def release(self, address: str, lease: str) -> None:
        """Give an encoded item back; no effect if its worker is gone."""
        link = self._links.get(address)
        if link is not None and link.calls is not None:
            link.calls.release(lease)

    def diffuse(self, address: str, request: DiffusionRequest) -> DiffusionCall:
        """Start a request for images or videos on the worker at ``address``.

        Raises:
            WorkerLostError: the worker accepts no such requests now.
        """
        return self._require(address).diffuse(request)

    def embed(self, address: str, request: EmbedRequest) -> EmbedCall:
        """Start a batch of token ids on the worker at ``address``.

        Raises:
            WorkerLostError: the worker accepts no such requests now.
        """
        return self._require(address).embed(request)

    async def rerank(self, address: str, request: RerankRequest) -> Ranking:
        """Score pairs of token ids on the worker at ``address``; see `RankCalls.rerank`.

        Raises:
            ServingError: they were not scored.
        """
        return await self._require(address).rerank(request)

    def _require(self, address: str) -> WorkerCalls:
        link = self._links.get(address)
        if link is None:
            raise WorkerLostError("the worker just disconnected; retry")
        return link.require()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            await follow(self._discovery, lambda addresses: self._follow(addresses, group))

    def _follow(self, addresses: Collection[str], group: asyncio.TaskGroup) -> None:
        for address in sorted(self._links.keys() - set(addresses)):
            log.info("worker no longer discovered", worker=address)
            self._links.pop(address).retire()
        for address in sorted(set(addresses) - self._links.keys()):
            link = self._links[address] = WorkerLink(
                address,
                functools.partial(WorkerCalls, unread=self.unread),
                self._router.changed,
                prefixes=self._router.prefixes,
                tls=self._tls,
                tracing=self._tracing,
            )
            group.create_task(self._keep(link))

    async def _keep(self, link: Link) -> None:
        self._router.add(link.view)
        try:
            await link.run()
        finally:
            self._router.remove(link.view)
