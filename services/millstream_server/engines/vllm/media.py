"""A prompt's images and videos as vLLM's features, made elsewhere: embeddings, or pixels.

vLLM's own media processor isn't used. What it doesn't check ends its core process:
`generation.media_checks` has counted rows, widths and placeholders before.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.vllm.launch import BuiltEngine
from millstream_server.generation.generator import MediaModel, read_media_model
from millstream_server.generation.request import GenerationRequest
from millstream_server.media.families import UnusableFamilyError
from millstream_server.media.items import Content, MediaInput, Modality
from millstream_server.runtime.errors import InternalError, InvalidRequestError
from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_FAMILIES: Mapping[str, frozenset[Modality]] = {
    "qwen2_5_vl": frozenset(Modality),
    # A video of it has a run of placeholders for each step.
    "qwen3_vl": frozenset({Modality.IMAGE}),
}
"""What of our families this adapter hands to vLLM; its Gemma 3 takes no embeddings."""
_ITEMS = 256
"""Most items of a prompt that vLLM allows; the checks have a limit of their own."""
_NAMES = {
    (Modality.IMAGE, Content.ROWS): "image_embeds",
    (Modality.VIDEO, Content.ROWS): "video_embeds",
    (Modality.IMAGE, Content.PIXELS): "pixel_values",
    (Modality.VIDEO, Content.PIXELS): "pixel_values_videos",
}


def media_model(model_path: str, role: Role) -> MediaModel | None:
    """Return what a model takes besides text; None: nothing."""
    try:
        found = read_media_model(Path(model_path), takes_pixels=role is not Role.DECODE)
    except UnusableFamilyError as error:
        log.warning("the model takes text only", reason=str(error))
        return None
    if found is None:
        return None
    taken = found.modalities & _FAMILIES.get(found.family, frozenset())
    if not taken:
        log.warning("the model takes text only", reason=f"the adapter has no {found.family}")
        return None
    soft = {modality: found.soft_tokens[modality] for modality in taken}
    return replace(found, modalities=taken, soft_tokens=soft)


def item_limits(media: MediaModel | None) -> Mapping[str, int] | None:
    """Return vLLM's `limit_mm_per_prompt`; it makes its largest dummy input of it."""
    if media is None:
        return None
    return {kind.value: _ITEMS if kind in media.modalities else 0 for kind in Modality}


def media_features(built: BuiltEngine, request: GenerationRequest, role: Role) -> Sequence[Any]:
    """Make vLLM's `MultiModalFeatureSpec`s; call it in a thread.

    A decode engine gets the KV cache, so the items' geometry is enough for it.

    Raises:
        InvalidRequestError: a number of a tensor isn't finite.
    """
    torch: Any = importlib.import_module("torch")
    qwen: Any = importlib.import_module("vllm.model_executor.models.qwen2_vl")
    merge = built.config.model_config.hf_config.vision_config.spatial_merge_size
    fields_of = qwen._create_qwen2vl_field_factory(merge)  # noqa: SLF001 - no public one
    features = []
    for item in request.prompt.media:
        tensors = _tensors(item, role, torch)
        fields = dict(fields_of(tensors))
        if "second_per_grid_ts" in tensors:
            fields["second_per_grid_ts"] = fields["video_grid_thw"]  # likewise one of an item
        kind = item.modality.value
        made = built.vllm.MultiModalKwargsItems.from_hf_inputs(tensors, fields)
        (span,) = item.spans
        identifier = _identifier(item)
        features.append(
            built.vllm.MultiModalFeatureSpec(
                data=made[kind][0],
                modality=kind,
                identifier=identifier,
                mm_position=built.vllm.PlaceholderRange(offset=span.start, length=span.length),
                mm_hash=identifier,
            )
        )
    return features


def _identifier(item: MediaInput) -> str:
    """Return the key of vLLM's caches, in hex: equal placeholders of different items differ."""
    rest = repr((item.modality.value, item.geometry, item.content.value)).encode()
    return hashlib.sha256(item.digest + rest).hexdigest()


def _tensors(item: MediaInput, role: Role, torch: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if item.geometry.grid:
        found[f"{item.modality.value}_grid_thw"] = torch.tensor([item.geometry.grid])
    if item.modality is Modality.VIDEO:
        found["second_per_grid_ts"] = torch.tensor([item.geometry.seconds_per_step])
    if role is Role.DECODE:
        return found
    if item.tensor is None:
        raise InternalError("The engine was given media without their tensors.")
    flat = torch.frombuffer(
        bytearray(item.tensor.data), dtype=getattr(torch, item.tensor.spec.element_type.value)
    )
    if not torch.isfinite(flat.sum(dtype=torch.float32)):
        # It would make logits NaN, also those of other prompts that share the text before it.
        raise InvalidRequestError.of(
            "media",
            f"a number of the {item.modality.value} tensors isn't finite; this model can't take it",
        )
    found[_NAMES[item.modality, item.content]] = flat.view(item.tensor.spec.shape)
    return found
