"""Bodies of /v1/images/generations and /v1/images/edits, of their answers and events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from millstream_server.processor.http.schema import Int32, Int64

Format = Literal["png", "webp", "jpeg"]


class Images(msgspec.Struct, kw_only=True):
    """What both endpoints have."""

    prompt: str
    model: str = ""
    n: Int32 | None = None
    size: str | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Format | None = None
    stream: bool | None = None
    partial_images: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    progress: bool | None = None
    negative_prompt: str | None = None
    num_inference_steps: Int32 | None = None
    guidance_scale: float | None = None
    seed: Int64 | None = None
    scheduler: str | None = None
    priority: Literal["low", "normal", "high"] | None = None
    # Refused
    background: str | None = None
    output_compression: int | None = None
    quality: str | None = None


class Generations(Images, kw_only=True):
    """The body of /v1/images/generations."""

    # Refused
    style: str | None = None


class Edits(Images, kw_only=True):
    """The form of /v1/images/edits: the fields, as texts, and one file."""

    image: bytes
    strength: float | None = None
    # Refused
    mask: bytes | None = None
    input_fidelity: str | None = None


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "background": (None, "auto", "opaque"),
    "output_compression": (None, 100),
    "quality": (None, "auto", "standard"),
    "style": (None,),
    "mask": (None,),
    "input_fidelity": (None,),
}
"""Fields that are refused, and values that ask for nothing."""


# ---- answers -------------------------------------------------------------------------------------


class TokenDetails(msgspec.Struct):
    """What the tokens were of."""

    text_tokens: int
    image_tokens: int = 0


class Usage(msgspec.Struct):
    """Tokens of the prompt; images have none here."""

    input_tokens: int
    total_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int = 0


class Image(msgspec.Struct, omit_defaults=True):
    """One image: its file in base64, or where it is; and the seed that makes it again."""

    seed: int
    b64_json: str | None = None
    url: str | None = None


class Made(msgspec.Struct):
    """The answer of both endpoints."""

    created: int
    data: list[Image]
    output_format: Format
    usage: Usage


class Progress(msgspec.Struct):
    """An event, if `progress` was asked for: requests before this one, or steps that are done."""

    type: str
    queue_position: int
    image_index: int
    step: int
    steps: int


class Partial(msgspec.Struct):
    """An event: an image as it would be now."""

    type: str
    b64_json: str
    created_at: int
    partial_image_index: int
    output_format: Format
    size: str
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"


class Completed(msgspec.Struct):
    """An event: an image that is complete. The last one's `usage` is that of the request."""

    type: str
    b64_json: str
    created_at: int
    output_format: Format
    size: str
    seed: int
    usage: Usage
    background: Literal["opaque"] = "opaque"
    quality: Literal["auto"] = "auto"
