"""What a loaded pipeline takes and makes, from its class, its parts and `millstream.json`."""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import threading
from dataclasses import dataclass
from typing import Any

from millstream_server.diffusion.diffuser import DiffuserInfo, ModelDefaults, ModelDefaultsError
from millstream_server.diffusion.request import Kind
from millstream_server.runtime.errors import EngineFailedError

_NEEDED = (
    "prompt",
    "height",
    "width",
    "num_inference_steps",
    "guidance_scale",
    "generator",
    "output_type",
    "callback_on_step_end",
)
# Pipelines of videos check this besides what their parts need.
_VIDEO_SIZE_STEP = 16
# For pipelines that name no default: Z-Image's own, and Wan's rate.
_SIDE = 1024
_FPS = 16
_MAX_PIXELS = 2048 * 2048
# The service makes outputs one after another: the engine has no limit of its own.
_MAX_OUTPUTS = 64


@dataclass(frozen=True, slots=True)
class Facts:
    """A pipeline's facts and limits."""

    kind: Kind
    info: DiffuserInfo
    """Without schedulers, which have to be tried."""
    max_side: int | None
    """Longest width or height that its position embeddings reach; None: no such limit."""
    passes_prompt_limit: bool
    """Whether the pipeline is told the limit of a prompt."""


def read_facts(pipe: Any, defaults: ModelDefaults, version: str) -> Facts:
    """Read them; ``version`` is that of diffusers.

    Raises:
        EngineFailedError: it doesn't make images or videos of a prompt alone.
        ModelDefaultsError: its defaults are none that it takes.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    missing = [name for name in _NEEDED if name not in parameters]
    name = type(pipe).__name__
    if missing or "image" in parameters:
        why = f"it takes no {missing[0]}" if missing else "it needs an image"
        raise EngineFailedError(f"A {name} can't make images or videos of a prompt alone: {why}.")
    given = {key: value.default for key, value in parameters.items()}
    kind = Kind.VIDEO if "num_frames" in parameters else Kind.IMAGE
    size_step, reach = (_video_sizes if kind is Kind.VIDEO else _image_sizes)(pipe)
    width = defaults.width or given["width"] or min(_SIDE, reach or _SIDE)
    height = defaults.height or given["height"] or min(_SIDE, reach or _SIDE)
    info = DiffuserInfo(
        engine="diffusers",
        engine_version=version,
        max_running_requests=1,
        kinds=frozenset({kind}),
        default_width=width,
        default_height=height,
        size_step=size_step,
        min_size=size_step,
        max_pixels=defaults.max_pixels or max(_MAX_PIXELS, width * height),
        default_steps=defaults.steps or given["num_inference_steps"],
        max_steps=defaults.max_steps or pipe.scheduler.config.num_train_timesteps,
        default_guidance_scale=float(
            given["guidance_scale"] if defaults.guidance_scale is None else defaults.guidance_scale
        ),
        max_outputs=_MAX_OUTPUTS,
        max_prompt_tokens=_prompt_limit(pipe, given, defaults),
        schedulers=(),
        negative_prompts="negative_prompt" in parameters,
        **(_video_facts(pipe, given, defaults) if kind is Kind.VIDEO else {}),
    )
    _check(info)
    return Facts(kind, info, reach, passes_prompt_limit="max_sequence_length" in parameters)


def _check(info: DiffuserInfo) -> None:
    """Check what `millstream.json` may have set."""
    step, width, height = info.size_step, info.default_width, info.default_height
    if width % step or height % step:
        raise ModelDefaultsError(
            f"the default size is {width} x {height}, not of multiples of {step}"
        )
    if width * height > info.max_pixels:
        raise ModelDefaultsError(f"the default size has more than {info.max_pixels} pixels")
    if info.default_steps > info.max_steps:
        raise ModelDefaultsError(
            f"{info.default_steps} default steps are more than the {info.max_steps} allowed"
        )
    if info.default_frames and (info.default_frames - 1) % info.frame_step:
        raise ModelDefaultsError(
            f"{info.default_frames} default frames are not one more than a multiple of "
            f"{info.frame_step}"
        )


def _image_sizes(pipe: Any) -> tuple[int, int | None]:
    step = math.lcm(
        pipe.image_processor.config.vae_scale_factor,
        pipe.vae_scale_factor * getattr(pipe, "patch_size", 1),
    )
    # Z-Image: a table of positions for the text's axis, the height and the width.
    lengths = getattr(getattr(pipe, "transformer", None), "config", {}).get("axes_lens")
    return step, min(lengths[1:]) * step if lengths else None


def _video_sizes(pipe: Any) -> tuple[int, int | None]:
    config = (pipe.transformer or pipe.transformer_2).config
    step = math.lcm(
        _VIDEO_SIZE_STEP, *(pipe.vae_scale_factor_spatial * side for side in config.patch_size[1:])
    )
    positions = config.get("rope_max_seq_len")
    return step, positions * step if positions else None


def _video_facts(pipe: Any, given: dict[str, Any], defaults: ModelDefaults) -> dict[str, Any]:
    frames = defaults.frames or int(given["num_frames"])
    return {
        "default_frames": frames,
        "max_frames": max(frames, defaults.max_frames or 0),
        "frame_step": int(pipe.vae_scale_factor_temporal),
        "default_fps": defaults.fps or _FPS,
    }


def _prompt_limit(pipe: Any, given: dict[str, Any], defaults: ModelDefaults) -> int:
    limits = [
        given.get("max_sequence_length", pipe.tokenizer.model_max_length),
        getattr(pipe.text_encoder.config, "max_position_embeddings", None),
        defaults.max_prompt_tokens,
    ]
    return int(min(limit for limit in limits if limit))


class PromptCounter:
    """Uses a copy of the tokenizer: the pipeline changes its own while it runs in its thread.

    Any thread may call it.
    """

    def __init__(self, pipe: Any) -> None:
        self._lock = threading.Lock()
        self._tokenizer = copy.deepcopy(pipe.tokenizer)
        # Z-Image writes a conversation around the prompt, whatever the tokenizer has.
        self._chat = type(pipe).__name__.startswith("ZImage")
        module = importlib.import_module(type(pipe).__module__)
        self._clean = getattr(module, "prompt_clean", None)

    def count(self, prompt: str) -> int:
        with self._lock:
            return len(self._tokenizer(self._read(prompt)).input_ids)

    def _read(self, prompt: str) -> str:
        if self._clean is not None:
            prompt = self._clean(prompt)
        if self._chat:
            prompt = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                tokenize=False,
                add_generation_prompt=True,
                enable_thinking=True,
            )
        return prompt
