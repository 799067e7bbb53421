"""What a model takes and makes: from its files, SGLang's defaults for it and `millstream.json`."""

from __future__ import annotations

import importlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream_server.diffusion.diffuser import DiffuserInfo, ModelDefaults, read_model_defaults
from millstream_server.diffusion.request import Kind
from millstream_server.engines.sglang.diffusion.config import SglangDiffuserConfig
from millstream_server.runtime.errors import EngineFailedError

_MAX_OUTPUTS = 64
_MAX_PIXELS = 2048 * 2048
_SIDE = 1024
_FPS = 16
# The deepest VAE has 16, and no transformer patches more than 2 x 2 of its latents.
_SIZE_STEP = 32
_VIDEO_SIZE_STEP = 16
# Of width and height: SGLang's Wan fails with a single patch, as a video of one frame may be.
_LEAST_PATCHES = {Kind.IMAGE: 1, Kind.VIDEO: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Sizes that the model's parts can work on."""

    size_step: int
    max_side: int | None
    """Longest side that its position embeddings reach; None: no such limit is known."""
    frame_step: int


def read_geometry(model_path: Path, kind: Kind) -> Geometry:
    """Read the configurations of the VAE and the transformer."""
    vae, transformer = _read(model_path, "vae"), _read(model_path, "transformer")
    depth = vae.get("block_out_channels") or vae.get("dim_mult")
    reduced = vae.get("scale_factor_spatial") or (1 << (len(depth) - 1) if depth else None)
    patch = transformer.get("all_patch_size") or transformer.get("patch_size")
    patch = max(patch) if isinstance(patch, list) else patch
    step = reduced * (patch or 2) if reduced else _SIZE_STEP
    if kind is Kind.VIDEO:
        step = math.lcm(step, _VIDEO_SIZE_STEP)
    # Z-Image: tables for the text, the height and the width. Wan: one for all.
    tables = transformer.get("axes_lens", [])[1:] or [transformer.get("rope_max_seq_len")]
    reach = [table * step for table in tables if table]
    return Geometry(
        size_step=step,
        max_side=min(reach, default=None),
        frame_step=int(vae.get("scale_factor_temporal") or 4) if kind is Kind.VIDEO else 1,
    )


def read_kind(pipeline_config: Any) -> Kind:
    """Return what SGLang's pipeline makes.

    Raises:
        EngineFailedError: neither images nor videos of a prompt alone.
    """
    task = pipeline_config.task_type
    if task.requires_image_input() or not task.is_visual_gen() or task.requires_video_input():
        raise EngineFailedError(f"SGLang runs this model for {task.name}, not for a prompt alone.")
    return Kind.IMAGE if task.is_image_gen() else Kind.VIDEO


def describe(
    config: SglangDiffuserConfig, server_args: Any, geometry: Geometry, prompt_limit: int
) -> DiffuserInfo:
    """Make the engine's info.

    Raises:
        ModelDefaultsError: `millstream.json` is wrong.
    """
    given = read_model_defaults(config.model_path)
    sampling: Any = importlib.import_module("sglang.multimodal_gen.configs.sample.sampling_params")
    own = sampling.SamplingParams.from_pretrained(
        str(config.model_path), backend=server_args.backend, model_id=server_args.model_id
    )
    kind = read_kind(server_args.pipeline_config)
    scheduler = _read(config.model_path, "scheduler")
    width = given.width or _whole(own.width or _SIDE, geometry)
    height = given.height or _whole(own.height or _SIDE, geometry)
    return DiffuserInfo(
        engine="sglang",
        engine_version=str(importlib.import_module("sglang").__version__),
        device=config.resolved_device(),
        max_running_requests=1,
        kinds=frozenset({kind}),
        default_width=width,
        default_height=height,
        size_step=geometry.size_step,
        min_size=geometry.size_step * _LEAST_PATCHES[kind],
        max_pixels=given.max_pixels or max(_MAX_PIXELS, width * height),
        default_steps=given.steps or own.num_inference_steps or 50,
        max_steps=given.max_steps or int(scheduler.get("num_train_timesteps", 1000)),
        default_guidance_scale=float(
            own.guidance_scale if given.guidance_scale is None else given.guidance_scale
        ),
        max_outputs=_MAX_OUTPUTS,
        max_prompt_tokens=min(prompt_limit, given.max_prompt_tokens or prompt_limit),
        schedulers=(_scheduler_name(str(scheduler.get("_class_name", "own"))),),
        **(_video_facts(own, given, geometry) if kind is Kind.VIDEO else {}),
    )


def _whole(side: int, geometry: Geometry) -> int:
    return min(side, geometry.max_side or side) // geometry.size_step * geometry.size_step


def _video_facts(own: Any, given: ModelDefaults, geometry: Geometry) -> dict[str, Any]:
    frames = given.frames or int(own.num_frames)
    return {
        "default_frames": frames,
        "max_frames": max(frames, given.max_frames or 0),
        "frame_step": geometry.frame_step,
        "default_fps": given.fps or int(own.fps or _FPS),
    }


def _scheduler_name(kind: str) -> str:
    """Return the name of a scheduler, as requests write it."""
    short = re.sub(r"(Multistep|Singlestep|Discrete)?Scheduler$", "", kind).replace(
        "UniPC", "Unipc"
    )
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()


def _read(model_path: Path, part: str) -> dict[str, Any]:
    for name in ("config.json", "scheduler_config.json"):
        file = model_path / part / name
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            return values if isinstance(values, dict) else {}
    return {}


class PromptCounter:
    """Lets SGLang's own code write out a prompt, and counts before it cuts.

    Of models with several text encoders it asks the last, which reads the most.
    """

    def __init__(self, pipeline_config: Any, model_path: Path) -> None:
        self._config = pipeline_config
        encoders = len(pipeline_config.text_encoder_configs)
        folder = model_path / ("tokenizer" if encoders == 1 else f"tokenizer_{encoders}")
        transformers: Any = importlib.import_module("transformers")
        self._tokenizer = _Uncut(transformers.AutoTokenizer.from_pretrained(str(folder)))
        self.count("")
        self.limit = self._tokenizer.limit
        """Most tokens that the text encoder reads."""

    def count(self, prompt: str) -> int:
        config = self._config
        preprocess = config.preprocess_text_funcs[-1]
        text = prompt if preprocess is None else preprocess(prompt)
        options = dict(config.text_encoder_configs[-1].tokenizer_kwargs)
        return len(config.tokenize_prompt([text], self._tokenizer, options)["input_ids"][0])


class _Uncut:
    """A tokenizer that neither cuts nor pads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.limit = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, texts: list[str], *_args: Any, **options: Any) -> Any:
        self.limit = int(options.get("max_length") or self._tokenizer.model_max_length)
        for name in ("padding", "truncation", "max_length", "return_tensors"):
            options.pop(name, None)
        return self._tokenizer(texts, **options)
