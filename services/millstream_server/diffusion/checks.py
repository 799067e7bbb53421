"""Checks a request against an engine's info, and fills its defaults in; for every hop.

The Processor and the worker call `resolve`: the first one draws the seed, and sends it on.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from typing import TypeVar

from millstream_server.diffusion.diffuser import MAX_GUIDANCE_SCALE, DiffuserInfo, Job
from millstream_server.diffusion.request import (
    DEFAULT_STRENGTH,
    MAX_SEED,
    DiffusionRequest,
    DiffusionSettings,
    Kind,
)
from millstream_server.media.items import Frames
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    UnsupportedFeatureError,
)
from millstream_server.runtime.request_id import short_text_violations

T = TypeVar("T")

MAX_PROMPT_BYTES = 32_768
MAX_FPS = 120
_RANDOM_SEEDS = 1 << 32
"""Random seeds are below it: short enough to be typed, and exact in JSON everywhere."""
_METHODS = {Kind.IMAGE: "GenerateImage", Kind.VIDEO: "GenerateVideo"}


def resolve(request: DiffusionRequest, info: DiffuserInfo, *, model: str) -> DiffusionSettings:
    """Return what the outputs are made with; a seed is drawn if the request has none.

    Raises:
        InvalidRequestError: it is beyond a limit; all wrong fields are named by their paths.
        UnsupportedFeatureError: it is valid, but asks for what this model or worker can't.
    """
    if request.kind not in info.kinds:
        raise _other_kind(request.kind, info)
    if violations := tuple(_violations(request, info)):
        raise InvalidRequestError.of_all(violations)
    if missing := tuple(_missing(request, info)):
        raise UnsupportedFeatureError.of_all(missing)
    is_video = request.kind is Kind.VIDEO
    return DiffusionSettings(
        model=model,
        width=request.width or info.default_width,
        height=request.height or info.default_height,
        steps=request.steps or info.default_steps,
        guidance_scale=_typed(_or(request.guidance_scale, info.default_guidance_scale)),
        seed=_or(request.seed, secrets.randbelow(_RANDOM_SEEDS)),
        scheduler=request.scheduler or next(iter(info.schedulers), ""),
        frames=(request.frames or info.default_frames) if is_video else 0,
        fps=(request.fps or info.default_fps) if is_video else 0,
        strength=_typed(_or(request.strength, DEFAULT_STRENGTH)) if request.input_image else None,
    )


def outputs_of(request: DiffusionRequest) -> int:
    """Return how many outputs a request asks for."""
    return 1 if request.n is None else request.n


def jobs(
    request: DiffusionRequest, settings: DiffusionSettings, input_image: Frames | None
) -> Iterator[Job]:
    """Yield a checked request's jobs, one per output; ``input_image`` has the output's size."""
    for output in range(outputs_of(request)):
        yield Job(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt,
            width=settings.width,
            height=settings.height,
            steps=settings.steps,
            guidance_scale=settings.guidance_scale,
            seed=settings.seed_of(output),
            scheduler=settings.scheduler,
            frames=max(1, settings.frames),
            input_image=input_image,
            strength=1.0 if settings.strength is None else settings.strength,
            preview_every_steps=request.preview_every_steps or 0,
            request_id=request.request_id,
        )


def check_tokens(field: str, tokens: int, info: DiffuserInfo) -> None:
    """Check the length of a prompt in tokens; only the worker can count them.

    Raises:
        InvalidRequestError: the text encoder would cut it.
    """
    if tokens > info.max_prompt_tokens:
        raise InvalidRequestError.of(
            field,
            f"has {tokens} tokens; the model's text encoder reads {info.max_prompt_tokens}: "
            "shorten it",
        )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _typed(value: float) -> float:
    """Return the number that was typed: a float of the wire has no more than 7 digits of it."""
    return float(f"{value:.7g}")


def _other_kind(kind: Kind, info: DiffuserInfo) -> UnsupportedFeatureError:
    made = sorted(info.kinds, key=lambda k: k.value)
    return UnsupportedFeatureError.of(
        "model",
        f"makes {' and '.join(f'{k.value}s' for k in made)}, no {kind.value}s; use "
        + " or ".join(_METHODS[k] for k in made),
    )


# ---- violations ----------------------------------------------------------------------------------


def _violations(request: DiffusionRequest, info: DiffuserInfo) -> Iterator[FieldViolation]:
    yield from short_text_violations(request.request_id)
    yield from _prompts(request)
    yield from _in_range("options.n", request.n, 1, info.max_outputs)
    yield from _size(request, info)
    yield from _in_range("options.steps", request.steps, 1, info.max_steps)
    yield from _guidance(request)
    if request.seed is not None and not 0 <= request.seed <= MAX_SEED:
        yield FieldViolation("options.seed", f"is {request.seed}; it must be below 2^63")
    if request.scheduler and request.scheduler not in info.schedulers:
        offered = ", ".join(info.schedulers)
        why = f"{request.scheduler[:64]!r} is not offered by this model; it offers {offered}"
        yield FieldViolation("options.scheduler", why)
    every = request.preview_every_steps
    if every is not None and every < 1:
        yield FieldViolation("options.preview_every_steps", f"is {every}; at least 1 is needed")
    yield from _input_image(request)
    if request.kind is Kind.VIDEO:
        yield from _frames(request, info)
        yield from _in_range("fps", request.fps, 1, MAX_FPS)


def _prompts(request: DiffusionRequest) -> Iterator[FieldViolation]:
    if not request.prompt:
        yield FieldViolation("options.prompt", "is empty; say what to show")
    for name in ("prompt", "negative_prompt"):
        nbytes = len(getattr(request, name).encode())
        if nbytes > MAX_PROMPT_BYTES:
            why = f"has {nbytes} bytes; at most {MAX_PROMPT_BYTES} are allowed"
            yield FieldViolation(f"options.{name}", why)


def _in_range(field: str, value: int | None, least: int, most: int) -> Iterator[FieldViolation]:
    if value is not None and not least <= value <= most:
        yield FieldViolation(field, f"is {value}; {least} to {most} are allowed")


def _size(request: DiffusionRequest, info: DiffuserInfo) -> Iterator[FieldViolation]:
    width, height = request.width, request.height
    if (width is None) != (height is None):
        missing, given = ("width", "height") if width is None else ("height", "width")
        yield FieldViolation(
            f"options.{missing}", f"is not set, but {given} is: set both or neither"
        )
    fits = True
    for name, value in (("width", width), ("height", height)):
        if value is None:
            continue
        if value < info.min_size:
            fits = False
            yield FieldViolation(
                f"options.{name}", f"is {value}; at least {info.min_size} is needed"
            )
        elif value % info.size_step:
            below = max(info.min_size, value - value % info.size_step)
            yield FieldViolation(
                f"options.{name}",
                f"is {value}; it must be a multiple of {info.size_step}, such as {below} or "
                f"{below + info.size_step}",
            )
    if fits and width and height and width * height > info.max_pixels:
        why = f"{width} x {height} is {width * height} pixels; {info.max_pixels} are allowed"
        yield FieldViolation("options.width", why)


def _guidance(request: DiffusionRequest) -> Iterator[FieldViolation]:
    scale = request.guidance_scale
    if scale is not None and not 0 <= scale <= MAX_GUIDANCE_SCALE:  # also NaN
        why = f"is {scale:g}; 0 to {MAX_GUIDANCE_SCALE:g} are allowed"
        yield FieldViolation("options.guidance_scale", why)


def _input_image(request: DiffusionRequest) -> Iterator[FieldViolation]:
    strength = request.strength
    if strength is None:
        return
    if not request.input_image:
        yield FieldViolation("input_image.data", "is empty, but a strength is set")
    if not 0 < strength <= 1 or not math.isfinite(strength):
        why = f"is {strength:g}; above 0, at most 1 is allowed"
        yield FieldViolation("input_image.strength", why)


def _frames(request: DiffusionRequest, info: DiffuserInfo) -> Iterator[FieldViolation]:
    frames, step = request.frames, info.frame_step
    if frames is None:
        return
    if not 1 <= frames <= info.max_frames:
        yield FieldViolation("frames", f"is {frames}; 1 to {info.max_frames} are allowed")
    elif (frames - 1) % step:
        below = frames - (frames - 1) % step
        yield FieldViolation(
            "frames",
            f"is {frames}; it must be one more than a multiple of {step}, such as {below} or "
            f"{below + step}",
        )


def _missing(request: DiffusionRequest, info: DiffuserInfo) -> Iterator[FieldViolation]:
    """Yield the fields that ask for what this model or worker can't do."""
    if request.input_image and not info.image_to_image:
        yield FieldViolation("input_image", "this model makes images from prompts only")
    if request.negative_prompt and not info.negative_prompts:
        yield FieldViolation("options.negative_prompt", "this model takes no negative prompt")
    if request.to_url and not info.urls:
        yield FieldViolation(
            "options.delivery",
            "the worker has no storage to return URLs of; ask for bytes, or start it with "
            "--storage-url",
        )
