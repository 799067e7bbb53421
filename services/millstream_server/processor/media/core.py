"""A turn's images and videos: encoded on workers, and placed in its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from millstream_server.encode.transfer.ticket import EmbeddingTickets
from millstream_server.generation.request import Prompt
from millstream_server.links.fleet import Fleet
from millstream_server.media.families.family import Family
from millstream_server.media.families.placing import place
from millstream_server.media.items import Content, EncodedItem, MediaFile, MediaInput
from millstream_server.processor.conversation import Caller
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget, Uploads
from millstream_server.processor.telemetry import TurnTelemetry
from millstream_server.processor.text.messages import MediaPart
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.router import Router
from millstream_server.runtime.errors import (
    Failure,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
)

_ATTEMPTS = 3
"""Workers that an item is sent to, when each is lost or shuts down."""


@dataclass(frozen=True, slots=True, eq=False)
class ProcessorMedia:
    """What takes in and encodes conversations' media; one per process."""

    router: Router
    encoders: Fleet
    intake: Intake
    budget: MediaBudget
    """Where the bytes of all conversations count."""
    tickets: EmbeddingTickets | None = field(default=None, kw_only=True)
    """Signs where a worker fetches the results; None: without a key."""
    shared_cache: bool = field(default=False, kw_only=True)
    """Whether callers share cached results; otherwise each has its own."""

    def uploads(self) -> Uploads:
        """Make the uploads of a new conversation; `close` frees the bytes of all its media."""
        return Uploads(self.budget, self.intake.max_item_bytes)


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part's result, and the address of the worker that has it."""

    part: MediaPart
    item: EncodedItem
    address: str


class TurnMedia:
    """The media of one turn: encoded, then held on their workers until `release`.

    While they are encoded it is what a conversation cancels (`conversation.Stoppable`).
    """

    def __init__(
        self,
        media: ProcessorMedia,
        request: RoutingRequest,
        request_id: str,
        caller: Caller,
        telemetry: TurnTelemetry,
    ) -> None:
        """``request`` has the turn's model and session."""
        self.encoded: tuple[EncodedPart, ...] = ()
        self.cancelled = False
        self._media = media
        self._request = request
        self._request_id = request_id
        self._caller = caller
        self._telemetry = telemetry
        self._held: list[tuple[str, str]] = []
        self._released = False
        self._task: asyncio.Future[None] | None = None
        self._error: Failure | None = None

    @property
    def held_at(self) -> str:
        """Address of the worker that must run the request too; empty: any may."""
        return self._request.media_at

    async def encode(
        self, parts: Sequence[MediaPart], prepare: Callable[[], Awaitable[None]]
    ) -> None:
        """Call ``prepare`` (`Intake.prepare`), then encode the parts, all at the same time.

        Sets `encoded`, unless `cancel` was called.

        Raises:
            ServingError: one of them can't be encoded; it is named by its field.
        """
        if self.cancelled or self._error:
            self._stop()
            return
        self._task = asyncio.ensure_future(self._encode_all(parts, prepare))
        try:
            await self._task
        except asyncio.CancelledError:
            if not self.cancelled and self._error is None:  # the RPC's task was cancelled
                self._task.cancel()
                raise
        if self.cancelled or self._error:
            self._stop()

    def _stop(self) -> None:
        self.release()
        if self._error:
            raise self._error

    async def _encode_all(
        self, parts: Sequence[MediaPart], prepare: Callable[[], Awaitable[None]]
    ) -> None:
        await prepare()
        tasks = [asyncio.ensure_future(self._encode(part)) for part in parts]
        try:
            self.encoded = tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _encode(self, part: MediaPart) -> EncodedPart:
        failed: set[str] = set()
        while True:
            workers = self._media.router.of(self._request.model)
            planned = workers.encoder(self._request, part.sha256, failed)
            if planned.own:  # the turn's other files, and the turn itself, go there too
                self._request = replace(self._request, media_at=planned.worker.address)
            address = planned.worker.address
            try:
                return await self._encode_at(address, part)
            except UnavailableError:
                failed.add(address)
                if len(failed) >= _ATTEMPTS or planned.own:
                    raise
            except InvalidRequestError as error:
                raise error.at(lambda _: part.field) from error

    async def _encode_at(self, address: str, part: MediaPart) -> EncodedPart:
        span = self._telemetry.at_worker("encode", address)
        file = MediaFile(
            modality=part.modality,
            data=part.data,
            sha256=part.sha256,
            salt="" if self._media.shared_cache else self._caller.name,
            request_id=self._request_id,
            trace=span.carry(self._caller.trace),
            deadline_s=self._caller.deadline_s,
        )
        try:
            item = await self._media.encoders.encode(address, file).result()
        except BaseException as error:
            span.failed(error)
            raise
        span.ended()
        if self._released:  # another item has failed meanwhile
            self._media.encoders.release(address, item.lease)
            raise RequestCancelledError("the turn ended before its media were encoded")
        self._held.append((address, item.lease))
        return EncodedPart(part, item, address)

    def with_tickets(self, prompt: Prompt) -> Prompt:
        """Name in ``prompt`` where the worker that runs it fetches its media.

        Raises:
            UnavailableError: this server can't make tickets.
        """
        tickets = self._media.tickets
        if tickets is None:
            raise UnavailableError("this server has no ticket key and can't use media")
        media = tuple(
            replace(item, ticket=tickets.mint(source.address, source.item))
            for item, source in zip(prompt.media, self.encoded, strict=True)
        )
        return replace(prompt, media=media)

    # ---- for the conversation --------------------------------------------------------------------

    def cancel(self) -> None:
        """Stop; `encode` then returns with nothing encoded."""
        self.cancelled = True
        if self._task:
            self._task.cancel()

    def fail(self, error: Failure) -> None:
        """Stop; `encode` then raises ``error``."""
        self._error = self._error or error
        if self._task:
            self._task.cancel()

    def release(self) -> None:
        """Give the results back to their workers. May be called twice."""
        self._released = True
        held, self._held = self._held, []
        for address, lease in held:
            self._media.encoders.release(address, lease)


# ---- the prompt ----------------------------------------------------------------------------------


def media_prompt(
    text: str,
    family: Family,
    encoded: Sequence[EncodedPart],
    encode: Callable[[str], Sequence[int]],
    field: str,
) -> Prompt:
    """Replace the placeholders in ``text`` and tokenize it. Takes milliseconds: use a thread.

    Raises:
        InvalidRequestError: the text has more or fewer placeholders than there are media.
    """
    items = [entry.item for entry in encoded]
    for index, item in enumerate(items):
        _check_item(index, item, family)
    token_ids, spans = place(text, family, items, encode, field)
    media = [
        MediaInput(
            modality=item.modality,
            spans=own,
            geometry=item.geometry,
            digest=item.digest,
            content=item.content,
        )
        for item, own in zip(items, spans, strict=True)
    ]
    return Prompt(token_ids, tuple(media))


def _check_item(index: int, item: EncodedItem, family: Family) -> None:
    """Check what an encode worker returned against the model.

    Raises:
        InternalError: the worker serves other weights, or has a bug.
    """
    if item.content is Content.PIXELS:
        return
    wanted = (item.tokens, family.embedding_width)
    if item.tensor.shape != wanted:
        raise InternalError(
            f"the encode worker returned a tensor of the shape {list(item.tensor.shape)} for the "
            f"conversation's image or video {index}; the model needs {list(wanted)}: tokens x width"
        )
