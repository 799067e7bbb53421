"""Images as OpenAI's API says them: one body, or events with previews and progress."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from millstream_server.diffusion.request import Chunk, FileFormat, Finished, Progress
from millstream_server.processor.http import images_schema as schema
from millstream_server.processor.http.output import encode
from millstream_server.runtime.rpc.http import HttpCall
from millstream_server.runtime.rpc.ledger import Hold


class Files:
    """An `Output` that keeps files."""

    stopped = None

    def __init__(self, held: Hold) -> None:
        """Count their bytes in ``held``."""
        self._held = held
        self._parts: defaultdict[int, list[bytes]] = defaultdict(list)

    def latest(self, entry: Progress | Chunk) -> None:
        """Ignore progress."""

    async def put(self, entry: Progress | Chunk, nbytes: int) -> None:
        """Keep a piece of a file.

        Raises:
            OverloadedError: there is no memory for it.
        """
        if isinstance(entry, Chunk):
            self._held.take(nbytes)
            self._parts[entry.output].append(entry.data)

    def in_base64(self, output: int) -> str:
        """Return a file that is complete."""
        return base64.b64encode(b"".join(self._parts.pop(output))).decode()


def written(files: Files, end: Finished) -> Iterator[bytes]:
    """Write one body, an image at a time."""
    before = b'{"created":%d,"data":[' % int(time.time())
    for output, file in enumerate(end.outputs):
        image = schema.Image(file.seed)
        if file.url:
            image.url = file.url
        else:
            image.b64_json = files.in_base64(output)
        yield before + encode(image)
        before = b","
    form = encode(_format(end.outputs[0].format))
    yield b'],"output_format":%b,"usage":%b}' % (form, encode(_usage(end.prompt_tokens)))


def _usage(tokens: int) -> schema.Usage:
    return schema.Usage(tokens, tokens, schema.TokenDetails(tokens))


def _format(form: FileFormat) -> Any:
    return form.value.removeprefix("image/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """What events are about."""

    kind: str
    """What their types begin with."""
    size: str
    partials: int
    """Most previews of an image."""
    progress: bool
    """Whether each step has an event."""


class ImageEvents(Files):
    """Events of images: a `runtime.rpc.call.Source`, too."""

    gathers = False

    def __init__(self, call: HttpCall, held: Hold, drawn: Drawn) -> None:
        """Send by ``call``."""
        super().__init__(held)
        self._call = call
        self._drawn = drawn
        self._created = int(time.time())
        self._partials: Counter[int] = Counter()
        self._pending: list[bytes] = []
        self._replaced_by_newer = False
        """Whether the last one that is pending says how far the request was."""
        self._ended = False
        self._error: BaseException | None = None

    # ---- from the worker

    def latest(self, entry: Progress | Chunk) -> None:
        if not isinstance(entry, Progress):
            return
        if entry.preview and self._partials[entry.output] < self._drawn.partials:
            self._held.take(len(entry.preview))
            self._send(self._partial(entry))
        if self._drawn.progress:
            if self._replaced_by_newer:
                self._pending.pop()
            self._send(self._progress(entry))
            self._replaced_by_newer = True

    def ended(self, making: asyncio.Future[Finished]) -> None:
        """Send the images of a request that has ended, or fail as it did."""
        if making.cancelled():
            return
        self._ended = True
        self._error = making.exception()
        if self._error is None:
            end = making.result()
            last = len(end.outputs) - 1
            for output, file in enumerate(end.outputs):
                self._send(
                    self._event(
                        schema.Completed(
                            f"{self._drawn.kind}.completed",
                            self.in_base64(output),
                            self._created,
                            _format(file.format),
                            self._drawn.size,
                            file.seed,
                            _usage(end.prompt_tokens if output == last else 0),
                        )
                    )
                )
        self._call.ready()

    def _progress(self, entry: Progress) -> bytes:
        return self._event(
            schema.Progress(
                f"{self._drawn.kind}.progress",
                entry.queue_position,
                entry.output,
                entry.step,
                entry.steps,
            )
        )

    def _partial(self, entry: Progress) -> bytes:
        index = self._partials[entry.output]
        self._partials[entry.output] += 1
        return self._event(
            schema.Partial(
                f"{self._drawn.kind}.partial_image",
                base64.b64encode(entry.preview).decode(),
                self._created,
                index,
                "webp",
                self._drawn.size,
            )
        )

    def _event(self, said: Any) -> bytes:
        return b"event: %b\ndata: %b\n\n" % (said.type.encode(), encode(said))

    def _send(self, event: bytes) -> None:
        self._pending.append(event)
        self._replaced_by_newer = False
        self._call.ready()

    # ---- to the client

    @property
    def over(self) -> bool:
        return self._ended and not self._pending

    def next(self) -> bytes | None:
        """Return the events there are.

        Raises:
            ServingError: the request has failed.
        """
        if self._error is not None:
            raise self._error
        pending, self._pending = self._pending, []
        self._replaced_by_newer = False
        return b"".join(pending) or None
