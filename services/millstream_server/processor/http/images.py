"""Images: /v1/images/generations and /v1/images/edits."""

from __future__ import annotations

import asyncio
import re
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from millstream_server.diffusion.request import DiffusionRequest, FileFormat, Kind
from millstream_server.processor.http import bodies
from millstream_server.processor.http import images_schema as schema
from millstream_server.processor.http.errors import refusing
from millstream_server.processor.http.form import read_form
from millstream_server.processor.http.forwarded import Pieces, common_fields
from millstream_server.processor.http.image_output import Drawn, Files, ImageEvents, written
from millstream_server.processor.http.pipeline import Pipeline
from millstream_server.processor.http.schema import check_supported, read
from millstream_server.runtime.errors import InvalidRequestError, UnsupportedFeatureError
from millstream_server.runtime.rpc.http import EVENTS, Endpoint, HttpCall
from millstream_server.runtime.rpc.ledger import Hold

_GENERATIONS = msgspec.json.Decoder(schema.Generations)
_SIZE = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})")
_NAMES = (
    (re.compile(r"\binput_image\.strength\b"), "strength"),
    (re.compile(r"\binput_image(?:\.data)?\b"), "image"),
    (re.compile(r"\boptions\.(?:width|height)\b"), "size"),
    (re.compile(r"\boptions\.steps\b"), "num_inference_steps"),
    (re.compile(r"\boptions\.delivery\b"), "response_format"),
    (re.compile(r"\boptions\."), ""),
)
_refuse = refusing(_NAMES)


class ImageEndpoints:
    """Serves them; one per process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._calls = pipeline.calls
        self._core = pipeline.images
        self._threads = pipeline.threads

    def endpoints(self) -> list[Endpoint]:
        return [
            Endpoint("POST", "/v1/images/generations", self.generate, _refuse),
            Endpoint("POST", "/v1/images/edits", self.edit, _refuse),
        ]

    async def generate(self, body: bytes, call: HttpCall) -> None:
        asked = await bodies.read(self._threads, body, _read_generations)
        await self._serve(asked, _request(asked, call), "image_generation", call)

    async def edit(self, body: bytes, call: HttpCall) -> None:
        read_edits = partial(_read_edits, dict(call.metadata).get("content-type", ""))
        asked = await bodies.read(self._threads, body, read_edits)
        image = {"input_image": asked.image, "strength": asked.strength}
        await self._serve(asked, _request(asked, call, **image), "image_edit", call)

    async def _serve(
        self, asked: schema.Images, request: DiffusionRequest, kind: str, call: HttpCall
    ) -> None:
        with self._calls.call(), closing(Hold(self._calls.held)) as held:
            if asked.stream:
                call.respond(EVENTS)
                await self._stream(asked, request, kind, held, call)
                return
            files = Files(held)
            end = await self._core.run(request, files)
            await call.send_from(Pieces(call, written(files, end)))

    async def _stream(
        self,
        asked: schema.Images,
        request: DiffusionRequest,
        kind: str,
        held: Hold,
        call: HttpCall,
    ) -> None:
        defaults = self._core.defaults(request.model)
        width, height = request.width or defaults.width, request.height or defaults.height
        drawn = Drawn(
            kind=kind,
            size=f"{width}x{height}",
            partials=asked.partial_images or 0,
            progress=bool(asked.progress),
        )
        if drawn.partials:
            steps = request.steps or defaults.steps
            every = -(-max(1, steps) // (drawn.partials + 1))
            request = replace(request, preview_every_steps=every)
        events = ImageEvents(call, held, drawn)
        making = asyncio.ensure_future(self._core.run(request, events))
        making.add_done_callback(events.ended)
        try:
            await call.send_from(events)
        finally:
            making.cancel()
            await asyncio.wait({making})


def _read_generations(body: bytes) -> schema.Generations:
    return read(_GENERATIONS, body, schema.UNSUPPORTED)


def _read_edits(content_type: str | bytes, body: bytes) -> schema.Edits:
    asked = read_form(schema.Edits, body, content_type)
    check_supported(asked, schema.UNSUPPORTED)
    if not asked.image:
        raise InvalidRequestError.of("image", "is empty")
    return asked


def _request(asked: schema.Images, call: HttpCall, **more: Any) -> DiffusionRequest:
    """Convert a body.

    Raises:
        InvalidRequestError: it is contradictory, or a part of it can't be read.
    """
    for name in ("partial_images", "progress"):
        if getattr(asked, name) and not asked.stream:
            raise InvalidRequestError.of(name, "needs stream")
    to_url = asked.response_format == "url"
    if to_url and asked.stream:
        raise InvalidRequestError.of("response_format", "events have b64_json; leave stream out")
    if asked.output_format == "jpeg":
        raise UnsupportedFeatureError.of("output_format", "must be png or webp")
    width, height = _size(asked.size)
    return DiffusionRequest(
        kind=Kind.IMAGE,
        prompt=asked.prompt,
        negative_prompt=asked.negative_prompt or "",
        n=asked.n,
        width=width,
        height=height,
        steps=asked.num_inference_steps,
        guidance_scale=asked.guidance_scale,
        seed=asked.seed,
        scheduler=asked.scheduler or "",
        to_url=to_url,
        format=FileFormat(f"image/{asked.output_format or 'png'}"),
        **common_fields(asked, call),
        **more,
    )


def _size(given: str | None) -> tuple[int | None, int | None]:
    if given in {None, "auto"}:
        return None, None
    found = _SIZE.fullmatch(given or "")
    if found is None:
        raise InvalidRequestError.of("size", "must be WIDTHxHEIGHT in pixels, or auto")
    return int(found[1]), int(found[2])
