"""The links to all discovered workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Collection
from typing import TypeVar

from millstream_server.diffusion.request import Chunk, DiffusionRequest, Finished, Progress
from millstream_server.embedding.request import (
    EmbedFinished,
    EmbedRequest,
    Ranking,
    RerankRequest,
    Vectors,
)
from millstream_server.generation.output import OutputSink
from millstream_server.generation.request import GenerationRequest
from millstream_server.links.encode_stream import Encoding
from millstream_server.links.entry_stream import SlotCall
from millstream_server.links.generation_stream import OpenGeneration
from millstream_server.links.grpc_channel import GrpcChannel
from millstream_server.links.link import WorkerLink, WorkerStreams
from millstream_server.links.unread import UnreadOutput
from millstream_server.media.items import MediaFile
from millstream_server.routing.discovery.sources import Addresses, Discovery, follow, round_s
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import WorkerLostError
from millstream_server.runtime.security.tls import ClientTls
from millstream_server.runtime.telemetry.log import get_log
from millstream_server.runtime.telemetry.tracing import Tracing

log = get_log(__name__)

StreamT = TypeVar("StreamT")


class Fleet:
    """Keeps a link to every discovered worker, and adds its view to the router.

    A worker that is no longer discovered gets no new requests; its link closes when its open
    requests have ended. If it is discovered again before, it gets a second link. One that drains is
    kept for a while where no other does what it does: discovery may know the next one later.
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
        self._open_channel = functools.partial(GrpcChannel, tls=tls, tracing=tracing)
        self._keeps = round_s(discovery) > 0
        self._found: Addresses = frozenset()
        """What discovery names now."""
        self._links: dict[str, WorkerLink] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        self._task = asyncio.ensure_future(self._run())

    async def close(self) -> None:
        """Disconnect; requests still open fail."""
        for link in self._links.values():
            link.close()
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    # ---- requests; all raise WorkerLostError if the worker accepts none of the kind now

    def generate(
        self, address: str, request: GenerationRequest, sink: OutputSink
    ) -> OpenGeneration:
        """Start a text request on the worker at ``address``; see `GenerationStream.start`."""
        stream = _still(self._streams(address).text, "generates")
        return stream.start(request, sink)

    def encode(self, address: str, file: MediaFile) -> Encoding:
        """Start to encode a file on the worker at ``address``; see `EncodeStream.start`."""
        stream = _still(self._streams(address).media, "encodes")
        return stream.start(file)

    def release(self, address: str, lease: str) -> None:
        """Give an encoded item back; no effect if its worker is gone."""
        link = self._links.get(address)
        if link is not None and link.streams is not None and link.streams.media is not None:
            link.streams.media.release(lease)

    def diffuse(
        self, address: str, request: DiffusionRequest
    ) -> SlotCall[Progress | Chunk, Finished]:
        """Start a request for images or videos on the worker; see `EntryStream.start`."""
        stream = _still(
            self._streams(address).diffusion.get(request.kind), f"makes {request.kind.value}s"
        )
        return stream.start(request)

    def embed(self, address: str, request: EmbedRequest) -> SlotCall[Vectors, EmbedFinished]:
        """Start a batch of token ids on the worker at ``address``; see `EntryStream.start`."""
        stream = _still(self._streams(address).vectors, "embeds")
        return stream.start(request)

    async def rerank(self, address: str, request: RerankRequest) -> Ranking:
        """Score pairs of token ids on the worker at ``address``; see `VectorStream.rerank`."""
        stream = _still(self._streams(address).vectors, "ranks")
        return await stream.rerank(request)

    def _streams(self, address: str) -> WorkerStreams:
        link = self._links.get(address)
        if link is None or link.streams is None or link.view.description is None:
            raise WorkerLostError("the worker just disconnected; retry")
        return link.streams

    # ---- links

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            await follow(self._discovery, lambda addresses: self._follow(addresses, group))

    def _follow(self, addresses: Collection[str], group: asyncio.TaskGroup) -> None:
        self._found = frozenset(addresses)
        self._let_go()
        for address in sorted(self._found - self._links.keys()):
            link = self._links[address] = WorkerLink(
                address,
                self._open_channel,
                self._changed,
                is_last=self._is_last,
                prefixes=self._router.prefixes,
                unread=self.unread,
            )
            group.create_task(self._keep(link))

    def _changed(self) -> None:
        self._router.changed()
        self._let_go()

    def _let_go(self) -> None:
        """Leave workers that discovery doesn't name, or that drain while another does the same."""
        for address, link in sorted(self._links.items()):
            kept = link.status.kept and self._is_last(link.view)
            if address not in self._found and address in self._links and not kept:
                log.info("worker no longer discovered", worker=address)
                self._links.pop(address).retire()
            elif not kept:
                link.let_go()

    def _is_last(self, view: WorkerView) -> bool:
        """Return whether no other worker does what one does, and discovery may find another."""
        own = view.last_description
        others = (link for link in self._links.values() if not link.status.kept)
        found = (link.view.description for link in others if link.view is not view)
        return self._keeps and not any(
            own and of and (of.model, of.role) == (own.model, own.role) for of in found
        )

    async def _keep(self, link: WorkerLink) -> None:
        self._router.add(link.view)
        try:
            await link.run()
        finally:
            self._router.remove(link.view)


def _still(stream: StreamT | None, does: str) -> StreamT:
    if stream is None:
        raise WorkerLostError(f"the worker at this address no longer {does}; retry")
    return stream
