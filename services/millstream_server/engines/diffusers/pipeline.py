"""A loaded pipeline of diffusers: runs one job at a time, all in the thread that loaded it."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from millstream_server.diffusion.diffuser import (
    DiffuserInfo,
    Job,
    Step,
    check_sides,
    probe_job,
    read_model_defaults,
)
from millstream_server.diffusion.request import Kind
from millstream_server.engines import torch_on_cpu
from millstream_server.engines.diffusers.adapter import INDEX, DiffusersConfig
from millstream_server.engines.diffusers.facts import PromptCounter, read_facts
from millstream_server.engines.diffusers.schedulers import Schedulers, works
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import EngineFailedError, InternalError, InvalidRequestError

# A scheduler of second order uses its formula from the second step on.
_CHECKED_STEPS = 2


class StoppedError(Exception):
    """The job was stopped."""


class LoadedPipeline:
    """A pipeline in memory, its schedulers checked."""

    def __init__(self, config: DiffusersConfig) -> None:
        """Load it, and run each scheduler at the smallest size. Anything may be raised."""
        torch_on_cpu.prepare()
        self._torch: Any = importlib.import_module("torch")
        diffusers: Any = importlib.import_module("diffusers")
        self._device = torch_on_cpu.torch_device(config.device, self._torch)
        self._stop = threading.Event()
        self._pipe = _load(config, self._torch, diffusers, self._device)
        defaults = read_model_defaults(config.model_path)
        self._facts = read_facts(self._pipe, defaults, str(diffusers.__version__))
        self._prompts = PromptCounter(self._pipe)
        self._watch_parts()
        self._schedulers = Schedulers(self._pipe.scheduler)
        self.info = replace(self._facts.info, schedulers=self._schedulers.names)
        self._schedulers.keep(lambda name: self._check(self._pipe, self._short(name)))
        self._image_pipe = _with_input_image(diffusers, self._pipe)
        self._image_schedulers: list[str] = []
        """Those that can start from an image."""
        if self._image_pipe is not None:
            self._image_schedulers = works(self._schedulers.names, self._check_with_image)
        self.info = replace(
            self.info,
            schedulers=self._schedulers.names,
            device=self._device,
            image_to_image=bool(self._image_schedulers),
        )

    def count_tokens(self, prompt: str) -> int:
        """See `Diffuser.count_tokens`; any thread may call it."""
        return self._prompts.count(prompt)

    def run(self, job: Job, report: Callable[[Step], None], stop: threading.Event) -> Frames:
        """Make one output.

        Raises:
            InvalidRequestError: the pipeline can't do this.
            StoppedError: ``stop`` was set.
            Exception: anything else is the vendor's.
        """
        self._stop = stop
        pipe = self._pipe if job.input_image is None else self._image_pipe
        if pipe is None:
            raise InvalidRequestError.of("input_image", "this model starts from a prompt only")
        self._check_job(pipe, job)

        def on_step_end(pipe: Any, index: int, _: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            self._end_if_stopped()
            done, every = index + 1, job.preview_every_steps
            shown = None
            if every and done % every == 0:
                shown = _preview(pipe, tensors["latents"])
            report(Step(done, pipe.num_timesteps, shown))
            return {}

        pipe.scheduler = self._schedulers.fresh(job.scheduler)
        made = pipe(**self._arguments(job), output_type="np", callback_on_step_end=on_step_end)
        if self._facts.kind is Kind.VIDEO:
            return _to_frames(made.frames[0], Modality.VIDEO)
        return _to_frames(made.images, Modality.IMAGE)

    def _arguments(self, job: Job) -> dict[str, Any]:
        facts = self._facts
        generator = self._torch.Generator("cpu").manual_seed(job.seed)
        arguments: dict[str, Any] = {
            "prompt": job.prompt,
            "height": job.height,
            "width": job.width,
            "num_inference_steps": job.steps,
            "guidance_scale": job.guidance_scale,
            "generator": generator,
        }
        if facts.passes_prompt_limit:
            arguments["max_sequence_length"] = facts.info.max_prompt_tokens
        if job.negative_prompt:
            arguments["negative_prompt"] = job.negative_prompt
        if facts.kind is Kind.VIDEO:
            arguments["num_frames"] = job.frames
        if job.input_image is not None:
            arguments["image"] = _from_frame(job.input_image)
            arguments["strength"] = job.strength
        return arguments

    def _check_job(self, pipe: Any, job: Job) -> None:
        """Refuse what a `DiffuserInfo` can't tell."""
        check_sides(job, self._facts.max_side)
        if job.input_image is not None and job.scheduler not in self._image_schedulers:
            able = ", ".join(self._image_schedulers)
            sentence = f"{job.scheduler} can't start from an image; use {able}"
            raise InvalidRequestError.of("options.scheduler", sentence)
        pipe._guidance_scale = job.guidance_scale  # noqa: SLF001 - its call sets the same
        if job.negative_prompt and not getattr(pipe, "do_classifier_free_guidance", True):
            sentence = f"has no effect with guidance_scale {job.guidance_scale:g}: raise that"
            raise InvalidRequestError.of("options.negative_prompt", sentence)

    def _short(self, scheduler: str) -> Job:
        return replace(smallest(self.info), scheduler=scheduler, steps=_CHECKED_STEPS)

    def _check(self, pipe: Any, job: Job) -> None:
        """Run a job without decoding. Anything may be raised."""
        pipe.scheduler = self._schedulers.fresh(job.scheduler)
        made = pipe(**self._arguments(job), output_type="latent", return_dict=False)[0]
        if not self._torch.isfinite(made).all():
            raise ArithmeticError(f"{job.scheduler} made values that are not numbers")

    def _check_with_image(self, scheduler: str) -> None:
        job = self._short(scheduler)
        blank = Frames(
            modality=Modality.IMAGE,
            width=job.width,
            height=job.height,
            data=memoryview(bytes(3 * job.width * job.height)),
        )
        self._check(self._image_pipe, replace(job, input_image=blank))

    def _watch_parts(self) -> None:
        """Let a stop take effect before each run of a part: between steps too, and in decoding."""
        modules = [*self._pipe.components.values()]
        modules += [getattr(self._pipe.vae, part, None) for part in ("encoder", "decoder")]
        for module in modules:
            if isinstance(module, self._torch.nn.Module):
                module.register_forward_pre_hook(lambda *_: self._end_if_stopped())

    def _end_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError

    def device_works(self) -> bool:
        """Return whether the device runs anything: after a fault of CUDA nothing does."""
        if self._device == "cpu":
            return True
        try:
            self._torch.zeros(1, device=self._device).add_(1).item()
            self._torch.cuda.synchronize()
        except Exception:  # noqa: BLE001 - the vendor's seam: anything may come
            return False
        return True

    def free_memory(self) -> None:
        """Return what torch keeps for later to the device."""
        if self._device != "cpu":
            self._torch.cuda.empty_cache()


def smallest(info: DiffuserInfo) -> Job:
    """Return the smallest job, of one step, as canaries run it."""
    return replace(probe_job(info), prompt="a probe")


def _load(config: DiffusersConfig, torch: Any, diffusers: Any, device: str) -> Any:
    transformers: Any = importlib.import_module("transformers")
    for vendor in (diffusers, transformers):
        vendor.utils.logging.set_verbosity_error()
        vendor.utils.logging.disable_progress_bar()
    types = {"default": torch_on_cpu.torch_dtype(config.dtype, device, torch)}
    if "AutoencoderKLWan" in _index(config.model_path).get("vae", ()):
        types["vae"] = torch.float32
    pipe = diffusers.DiffusionPipeline.from_pretrained(
        config.model_path,
        torch_dtype=types,
        local_files_only=True,
        use_safetensors=True,  # other files of weights may run code
    ).to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.is_file():
        raise EngineFailedError(f"The model's folder has no {INDEX}: it is no pipeline.")
    index: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return index


def _with_input_image(diffusers: Any, pipe: Any) -> Any:
    """Return the sibling that starts from an image, around the same parts; None: there is none."""
    if hasattr(pipe, "video_processor"):
        return None
    try:
        sibling = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    except ValueError:
        return None
    sibling.set_progress_bar_config(disable=True)
    return sibling


# ---- pixels --------------------------------------------------------------------------------------

# Latents are decoded as the pipelines do it at the end. Two layouts are known: [1, channels,
# height, width] with a scale and a shift (Z-Image, Stable Diffusion), and [1, channels, frames,
# height, width] with a mean and a deviation for each channel (Wan). Others get no previews.
_IMAGE_AXES = 4
_VIDEO_AXES = 5


def _to_frames(pixels: Any, modality: Modality) -> Frames:
    """Round [frames, height, width, 3] of floats from 0 to 1 as diffusers does for PIL.

    Raises:
        InternalError: some are not numbers.
    """
    if not np.isfinite(pixels).all():
        raise InternalError("The model made values that are not numbers; try another dtype.")
    rounded = (pixels * 255).round().astype(np.uint8)
    count, height, width, _ = rounded.shape
    return Frames(
        modality=modality,
        width=width,
        height=height,
        data=memoryview(rounded.tobytes()),
        count=count,
        total_frames=count,
        indices=tuple(range(count)),
    )


def _from_frame(frame: Frames) -> Any:
    """Return one RGB frame as [1, height, width, 3] of float32 from 0 to 1."""
    pixels = np.frombuffer(frame.data, np.uint8).reshape(1, frame.height, frame.width, 3)
    return pixels.astype(np.float32) / 255.0


def _preview(pipe: Any, latents: Any) -> Frames | None:
    """Decode the latents of an image, or of a video's first frame; None: unknown layout."""
    unscale = _LAYOUTS.get((latents.dim(), type(pipe.vae).__name__))
    if unscale is None:
        return None
    torch: Any = importlib.import_module("torch")
    with torch.no_grad():
        ready = unscale(pipe.vae.config, latents.to(pipe.vae.dtype))
        decoded = pipe.vae.decode(ready, return_dict=False)[0]
    if decoded.dim() == _VIDEO_AXES:
        decoded = decoded[:, :, 0]
        return _to_frames(pipe.video_processor.postprocess(decoded, "np"), Modality.IMAGE)
    return _to_frames(pipe.image_processor.postprocess(decoded, "np"), Modality.IMAGE)


def _image(config: Any, latents: Any) -> Any:
    return latents / config.scaling_factor + (config.shift_factor or 0.0)


def _first_frame(config: Any, latents: Any) -> Any:
    mean = latents.new_tensor(config.latents_mean).view(1, -1, 1, 1, 1)
    deviation = latents.new_tensor(config.latents_std).view(1, -1, 1, 1, 1)
    return latents[:, :, :1] * deviation + mean


_LAYOUTS: dict[tuple[int, str], Callable[[Any, Any], Any]] = {
    (_IMAGE_AXES, "AutoencoderKL"): _image,
    (_VIDEO_AXES, "AutoencoderKLWan"): _first_frame,
}
