"""Takes in a turn's images and videos: fetches URLs, looks at the first bytes, hashes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field

from millstream_server.media.items import Modality
from millstream_server.media.sniff import check_media
from millstream_server.processor.media.urls import UrlFetcher
from millstream_server.processor.text.messages import MediaPart
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.rpc.ledger import Hold

_SMALL_BYTES = 64 << 10
"""Up to this size hashing on the event loop takes less time than a thread costs."""


@dataclass(frozen=True, slots=True)
class Intake:
    """Makes media ready to be encoded; one per process. Bounds are per file and conversation."""

    urls: UrlFetcher
    max_item_bytes: int = field(kw_only=True)
    max_items: int = field(kw_only=True)

    async def prepare(
        self, parts: Sequence[MediaPart], modalities: Collection[Modality], hold: Hold
    ) -> None:
        """Fill in `data` and `sha256` of each part; parts of earlier turns have them already.

        Raises:
            ServingError: one of them can't be used; it is named by its field.
        """
        if len(parts) > self.max_items:
            raise InvalidRequestError.of(
                parts[self.max_items].field,
                f"the conversation has {len(parts)} images and videos; at most {self.max_items} "
                "are allowed",
            )
        for part in parts:
            if part.modality not in modalities:
                raise _not_taken(part, modalities)
        async with _tasks() as group:
            for part in parts:
                if not part.sha256:
                    group.create_task(self._prepare(part, hold))

    async def _prepare(self, part: MediaPart, hold: Hold) -> None:
        if part.url and not part.data:
            await self._fetch(part, hold)
        if part.pieces:
            part.data = await _joined(part.pieces)
            part.pieces = ()
        if not part.data:
            raise InvalidRequestError.of(part.field, "is empty")
        if len(part.data) > self.max_item_bytes:
            raise InvalidRequestError.of(
                part.field,
                f"has {len(part.data)} bytes; at most {self.max_item_bytes} are allowed",
            )
        check_media(part.data, part.modality, part.field)
        if len(part.data) <= _SMALL_BYTES:
            part.sha256 = hashlib.sha256(part.data).digest()
        else:
            part.sha256 = (await asyncio.to_thread(hashlib.sha256, part.data)).digest()

    async def _fetch(self, part: MediaPart, hold: Hold) -> None:
        """Fetch a URL; its bytes count from the first one on."""
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            hold.take(size)
            taken += size

        try:
            part.data = await self.urls.fetch(part.url, part.field, take)
        except BaseException:
            hold.give_back(taken)
            raise


async def _joined(pieces: Sequence[bytes]) -> bytes:
    if len(pieces) == 1:
        return pieces[0]
    if sum(map(len, pieces)) <= _SMALL_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(b"".join, pieces)


def _not_taken(part: MediaPart, modalities: Collection[Modality]) -> UnsupportedFeatureError:
    kind = part.modality.value
    if not modalities:
        what = (
            f"this model takes no {kind} now: its workers take text only (ListModels shows what a "
            "model takes)"
        )
    else:
        taken = " and ".join(sorted(modality.value for modality in modalities))
        what = f"this model takes no {kind}; it takes {taken}"
    return UnsupportedFeatureError.of(part.field, what)


@contextlib.asynccontextmanager
async def _tasks() -> AsyncIterator[asyncio.TaskGroup]:
    """Yield a task group that raises the first failure itself, without an ExceptionGroup."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
