"""The model's own image and video processors: frames to the tower's input."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from millstream_server.encode.encoder import Prepared
from millstream_server.engines.transformers.tower import PixelInputs
from millstream_server.media.families.family import Family, ModelConfig
from millstream_server.media.items import Frames, Geometry, Modality
from millstream_server.runtime.errors import InvalidRequestError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

# Beyond it the processors of the Qwen families refuse, and a model sees nothing anyway.
_MAX_ASPECT = 200


class Preprocessor:
    """Thread-safe: the processors keep nothing of a call."""

    def __init__(self, family: Family, model_path: Path, max_item_tokens: int) -> None:
        """Load the processors.

        Raises:
            Exception: transformers can't load one.
        """
        transformers = importlib.import_module("transformers")
        self._torch: Any = importlib.import_module("torch")
        self._metadata: Any = importlib.import_module("transformers.video_utils").VideoMetadata
        self._family = family
        self._max_item_tokens = max_item_tokens
        self._patch = ModelConfig(model_path).integer("patch_size", section="vision_config")
        self._image: Any = transformers.AutoImageProcessor.from_pretrained(model_path)
        self._video: Any = None
        if Modality.VIDEO in family.modalities:
            self._video = transformers.AutoVideoProcessor.from_pretrained(model_path)

    def prepare(self, frames: Frames) -> Prepared:
        self._check(frames)
        try:
            made = self._process(frames)
        except ValueError as error:
            log.warning("the model's processor refused an item", error=error)
            name = frames.modality.value
            size = f"{frames.count} frames of " if frames.modality is Modality.VIDEO else ""
            raise InvalidRequestError.of(
                "data",
                f"the model can't take this {name} of {size}{frames.width} x {frames.height} "
                "pixels; send one of a more usual size",
            ) from error
        prepared = self._prepared(frames, made)
        if prepared.tokens > self._max_item_tokens:
            raise InvalidRequestError.of(
                "data",
                f"this {frames.modality.value} takes {prepared.tokens} tokens, at most "
                f"{self._max_item_tokens} are allowed; send a smaller or shorter one",
            )
        return prepared

    def _check(self, frames: Frames) -> None:
        if frames.modality not in self._family.modalities:
            raise InvalidRequestError.of("data", f"the model reads no {frames.modality.value}s")
        sides = sorted((frames.width, frames.height))
        if sides[1] > _MAX_ASPECT * sides[0]:
            raise InvalidRequestError.of(
                "data",
                f"{frames.width} x {frames.height} pixels: one side is more than {_MAX_ASPECT} "
                "times the other; send a less narrow one",
            )
        if frames.modality is Modality.VIDEO:
            self._check_video(frames)

    def _check_video(self, frames: Frames) -> None:
        if frames.fps <= 0 or frames.total_frames < 1 or len(frames.indices) != frames.count:
            raise InvalidRequestError.of("data", "the video's frames have no times")
        # A grid step's, unless the processor repeats the last frame.
        least = 1 if self._family.repeats_frames else int(self._video.temporal_patch_size)
        if frames.count < least:
            raise InvalidRequestError.of(
                "data", f"the video has {frames.count} frames; the model needs at least {least}"
            )

    def _process(self, frames: Frames) -> PixelInputs:
        shape = (frames.count, frames.height, frames.width, 3)
        # A writable copy: PyTorch takes no other memory, and `prepare` keeps no argument.
        pixels = self._torch.frombuffer(bytearray(frames.data), dtype=self._torch.uint8)
        pixels = pixels.reshape(shape).permute(0, 3, 1, 2)
        if frames.modality is Modality.IMAGE:
            made = self._image(
                images=[pixels[0]], input_data_format="channels_first", return_tensors="pt"
            )
            return PixelInputs(made["pixel_values"], made.get("image_grid_thw"))
        metadata = self._metadata(
            total_num_frames=frames.total_frames,
            fps=frames.fps,
            duration=frames.total_frames / frames.fps,
            frames_indices=list(frames.indices),
        )
        made = self._video(
            videos=[pixels], do_sample_frames=False, video_metadata=[metadata], return_tensors="pt"
        )
        return PixelInputs(made["pixel_values_videos"], made["video_grid_thw"])

    def _prepared(self, frames: Frames, inputs: PixelInputs) -> Prepared:
        if inputs.grid is None:
            tokens, geometry = self._family.image_tokens, Geometry()
            cost = inputs.pixels.shape[-1] * inputs.pixels.shape[-2] // self._patch**2
        else:
            steps, height, width = (int(size) for size in inputs.grid[0].tolist())
            processor = self._image if frames.modality is Modality.IMAGE else self._video
            tokens = steps * height * width // int(processor.merge_size) ** 2
            geometry = self._geometry(frames, (steps, height, width))
            cost = steps * height * width
        return Prepared(
            modality=frames.modality, tokens=tokens, geometry=geometry, inputs=inputs, cost=cost
        )

    def _geometry(self, frames: Frames, grid: tuple[int, int, int]) -> Geometry:
        if frames.modality is Modality.IMAGE:
            return Geometry(grid=grid)
        per_step = int(self._video.temporal_patch_size)
        if self._family.writes_times:
            times = step_times(frames.indices, frames.fps, per_step)
            return Geometry(grid=grid, timestamps_s=times)
        read_fps = len(frames.indices) / frames.total_frames * frames.fps
        return Geometry(grid=grid, seconds_per_step=per_step / read_fps)


def step_times(indices: Sequence[int], fps: float, per_step: int) -> tuple[float, ...]:
    """Return the time of each grid step: midway between its first and last frame.

    ``indices`` are the frames' numbers in the file; the last one fills up the last step.
    """
    missing = -len(indices) % per_step
    filled = [*indices, *[indices[-1]] * missing]
    times = [index / fps for index in filled]
    return tuple(
        (times[start] + times[start + per_step - 1]) / 2 for start in range(0, len(times), per_step)
    )
