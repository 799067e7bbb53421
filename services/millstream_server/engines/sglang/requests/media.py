"""Translates a prompt's images and videos to SGLang's `image_data` and `video_data`.

SGLang takes exactly one preprocessed dict per modality, with everything of the prompt in it. What
it doesn't check ends its process: `generation.media_checks` has counted all of it before.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.media.items import Content, MediaInput, Modality, cache_key
from millstream_server.media.tensor import Tensor
from millstream_server.runtime.errors import InternalError, InvalidRequestError

_PIXELS = {Modality.IMAGE: "pixel_values", Modality.VIDEO: "pixel_values_videos"}
_MIXES_STEPS = frozenset({"qwen2_5_vl"})
"""Families whose tower in SGLang needs `steps_apart`; the names are SGLang's and ours."""


def media_arguments(media: Sequence[MediaInput], role: Role) -> dict[str, object]:
    """Make the arguments of `Engine.async_generate` for a prompt's items; call it in a thread.

    A decode engine gets the KV cache, so the items' geometry is enough for it.

    Raises:
        InvalidRequestError: a number of a tensor isn't finite.
    """
    found: dict[str, object] = {}
    for modality in Modality:
        items = [item for item in media if item.modality is modality]
        if items:
            found[f"{modality.value}_data"] = [_bundle(items, modality, media, role)]
    return found


def _bundle(
    items: Sequence[MediaInput], modality: Modality, media: Sequence[MediaInput], role: Role
) -> dict[str, object]:
    torch = importlib.import_module("torch")  # SGLang has imported it
    bundle: dict[str, object] = {
        "format": "processor_output",
        "modality": modality.value,
        # The prefix cache's key of all of the modality's placeholders. Without it SGLang takes the
        # tensor's hash, which is the same for all geometry on a decode engine.
        "hash": cache_key(items),
        # First and last token of each span; else SGLang looks for runs of equal tokens.
        "offsets": [
            (span.start, span.start + span.length - 1) for item in items for span in item.spans
        ],
    }
    if role is Role.DECODE:
        bundle["precomputed_embeddings"] = torch.zeros(sum(item.tokens for item in items), 1)
    else:
        parts = [_to_torch(item, torch) for item in items]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        _check_finite(whole, modality, torch)
        pixels = items[0].content is Content.PIXELS
        bundle[_PIXELS[modality] if pixels else "precomputed_embeddings"] = whole
    grids = [item.geometry.grid for item in items if item.geometry.grid]
    if grids:
        bundle[f"{modality.value}_grid_thw"] = torch.tensor(grids)
    # SGLang reads the timing of videos in the first dict, even if that has the images.
    times = [i.geometry.seconds_per_step for i in media if i.modality is Modality.VIDEO]
    if any(times):
        bundle["second_per_grid_ts"] = torch.tensor(times)
    return bundle


def _check_finite(whole: Any, modality: Modality, torch: Any) -> None:
    """Refuse numbers that would make the logits NaN: drawing a token of those ends SGLang.

    They also reach the KV of the text before them, which other prompts take from the prefix cache:
    attention multiplies masked values by 0, and 0 times NaN is NaN. The sum is finite only if every
    number is, and takes a tenth of the time of looking at each.
    """
    if not torch.isfinite(whole.sum(dtype=torch.float32)):
        raise InvalidRequestError.of(
            "media",
            f"a number of the {modality.value} tensors isn't finite; this model can't take it",
        )


def _to_torch(item: MediaInput, torch: Any) -> Any:
    """View the fetched bytes as a tensor, without a copy unless they are read-only."""
    tensor: Tensor | None = item.tensor
    if tensor is None:
        raise InternalError("The engine was given media without their tensors.")
    data = bytearray(tensor.data) if tensor.data.readonly else tensor.data
    flat = torch.frombuffer(data, dtype=getattr(torch, tensor.spec.element_type.value))
    return flat.view(tensor.spec.shape)


# ---- videos in SGLang's own tower ----------------------------------------------------------------


def steps_apart(family: str, grid: Any) -> Any:
    """Return the grid for SGLang's tower: [videos, 3], or [steps, 3] with a row per time step.

    In full-attention layers of Qwen2.5-VL's tower SGLang 0.5.23 lets all patches of a row attend to
    each other (`cu_seqlens` in its models/qwen2_5_vl.py; its pull request 12261 would mend that).
    The model was trained with attention within a time step, as transformers has it. All else in the
    tower is by step already, so a row per step gives transformers' embeddings.
    """
    if family not in _MIXES_STEPS:
        return grid
    rows = grid.repeat_interleave(grid[:, 0], dim=0)
    rows[:, 0] = 1
    return rows


def keep_steps_apart(processor: Any) -> None:
    """Apply `steps_apart` to videos that reach the engine as pixels.

    ``processor`` is SGLang's, in this process. It computes positions from the whole grid, so the
    grid can't be divided in `media_arguments`.
    """
    if getattr(processor, "model_type", None) not in _MIXES_STEPS:
        return
    process: Callable[..., Coroutine[Any, Any, Any]] = processor.process_mm_data_async

    async def process_apart(*args: Any, **kwargs: Any) -> Any:
        made = await process(*args, **kwargs)
        for item in made.mm_items:
            if item.is_video() and item.feature is not None:
                item.video_grid_thw = steps_apart(processor.model_type, item.video_grid_thw)
        return made

    processor.process_mm_data_async = process_apart
