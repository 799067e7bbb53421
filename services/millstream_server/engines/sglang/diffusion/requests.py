"""Jobs as SGLang's requests, its results as `Frames`, its errors as ours."""

from __future__ import annotations

import importlib
from typing import Any

from millstream_server.diffusion.diffuser import Job, too_little_memory
from millstream_server.diffusion.request import Kind
from millstream_server.engines.sglang.diffusion.child import PREVIEW_KEY, Picture
from millstream_server.media.items import Frames, Modality
from millstream_server.runtime.errors import InternalError, InvalidRequestError, ServingError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")


def make_request(server_args: Any, job: Job, kind: Kind, request_id: str) -> Any:
    """Make SGLang's `Req`.

    Raises:
        InvalidRequestError: SGLang refuses it.
    """
    sampling: Any = importlib.import_module("sglang.multimodal_gen.configs.sample.sampling_params")
    entrypoint: Any = importlib.import_module("sglang.multimodal_gen.runtime.entrypoints.utils")
    try:
        parameters = sampling.SamplingParams.from_user_sampling_params_args(
            server_args.model_path, server_args=server_args, **_arguments(job, kind)
        )
        request = entrypoint.prepare_request(server_args=server_args, sampling_params=parameters)
    except (TypeError, ValueError) as error:
        log.warning("SGLang refused a request", request_id=job.request_id, error=error)
        raise InvalidRequestError("The engine refused the request.") from error
    if job.negative_prompt and not parameters.should_use_classifier_free_guidance():
        why = f"has no effect with guidance_scale {job.guidance_scale:g}: raise that"
        raise InvalidRequestError.of("options.negative_prompt", why)
    request.request_id = request_id
    request.extra[PREVIEW_KEY] = job.preview_every_steps
    return request


def _arguments(job: Job, kind: Kind) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "prompt": job.prompt,
        "negative_prompt": job.negative_prompt,
        "width": job.width,
        "height": job.height,
        "num_inference_steps": job.steps,
        "guidance_scale": job.guidance_scale,
        "seed": job.seed,
        "save_output": False,
        "return_frames": True,
    }
    if kind is Kind.VIDEO:
        arguments["num_frames"] = job.frames
    return arguments


def read_result(result: Any, job: Job, kind: Kind) -> Frames:
    """Take the frames out of SGLang's `OutputBatch`.

    Raises:
        OverloadedError: there was too little memory.
        InternalError: anything else; the log has the cause.
    """
    if result.error is not None:
        raise _failure(str(result.error), job)
    numpy: Any = importlib.import_module("numpy")
    made = numpy.asarray(result.output[0]) if result.output is not None else numpy.empty(0)
    if made.shape != (job.frames, job.height, job.width, 3) or made.dtype != numpy.uint8:
        raise _failure(f"it made {made.dtype} of the shape {made.shape}", job)
    return Frames(
        modality=Modality.IMAGE if kind is Kind.IMAGE else Modality.VIDEO,
        width=job.width,
        height=job.height,
        data=memoryview(numpy.ascontiguousarray(made)).cast("B"),
        count=job.frames,
        total_frames=job.frames,
        indices=tuple(range(job.frames)),
    )


def _failure(reason: str, job: Job) -> ServingError:
    if any(words in reason.lower() for words in _OUT_OF_MEMORY):
        log.warning("too little memory for a job", width=job.width, height=job.height)
        return too_little_memory(job)
    failure = InternalError.with_id()
    log.error("SGLang failed", reason=reason, error_id=failure.error_id)
    return failure


def preview_frames(picture: Picture) -> Frames:
    """Make frames of a preview."""
    return Frames(
        modality=Modality.IMAGE,
        width=picture.width,
        height=picture.height,
        data=memoryview(picture.data),
    )
