"""Vision-language models made on the spot: tiny, random weights, the same every time, no download.

`make_vision_model` writes one that transformers and SGLang run, without importing either.
`reference_answer` is what transformers says to a prompt: token for token the truth.
"""

from __future__ import annotations

import functools
import io
import json
import os
import sysconfig
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import numpy as np

from millstream_server.media.items import Frames, Modality
from tests.support.models import vision_weights

FamilyName = Literal["qwen2_5_vl", "qwen3_vl", "gemma3"]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)
VOCAB_SIZE = 1024
CONTEXT_LENGTH = 8192
EOS_TOKEN_ID = 2

_SPECIAL_TOKENS = (
    "<unk>",
    "<s>",
    "</s>",
    "<pad>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
)
_ID = {token: index for index, token in enumerate(_SPECIAL_TOKENS)}
_CORPUS_FILES = 30
_MERGE = 2
_TILES = 4

_TEMPLATE = """\
{%- for message in messages %}{{ "<|im_start|>" + message.role + "\\n" }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content or [] %}
{%- if part.type == "text" %}{{ part.text }}
{%- elif part.type == "image" %}{{ "IMAGE" }}
{%- elif part.type == "video" %}{{ "VIDEO" }}
{%- endif %}{% endfor %}{% endif %}
{{- "<|im_end|>\\n" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}
"""
_IMAGE = {
    "qwen2_5_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen3_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma3": "<start_of_image>",
}
_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_LENGTH,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_QWEN_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 4,
    "in_channels": 3,
    "spatial_merge_size": _MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
}
_QWEN = {
    "image_token_id": _ID["<|image_pad|>"],
    "video_token_id": _ID["<|video_pad|>"],
    "vision_start_token_id": _ID["<|vision_start|>"],
    "vision_end_token_id": _ID["<|vision_end|>"],
    "tie_word_embeddings": False,
    "dtype": "float32",
}
_CONFIG: Mapping[FamilyName, dict[str, Any]] = {
    "qwen2_5_vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": _TEXT
        | {
            "model_type": "qwen2_5_vl_text",
            "num_hidden_layers": 2,
            "rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]},
        },
        "vision_config": _QWEN_VISION
        | {
            "model_type": "qwen2_5_vl_vision",
            "depth": 2,
            "patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        **_QWEN,
    },
    "qwen3_vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": _TEXT
        | {
            "model_type": "qwen3_vl_text",
            "num_hidden_layers": 4,  # at least one per deepstack level
            "head_dim": 16,
            "rope_parameters": _ROPE | {"mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        "vision_config": _QWEN_VISION
        | {
            "model_type": "qwen3_vl_vision",
            "depth": 4,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1, 2],
        },
        **_QWEN,
    },
    "gemma3": {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": _TEXT
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "sliding_window": 512,
            "query_pre_attn_scalar": 16,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "vision_use_head": False,
        },
        "mm_tokens_per_image": 4,
        "boi_token_index": _ID["<start_of_image>"],
        "eoi_token_index": _ID["<end_of_image>"],
        "image_token_index": _ID["<image_soft_token>"],
        "tie_word_embeddings": True,
        "dtype": "float32",
    },
}


def _patches(patch: int, mean: list[float], std: list[float]) -> dict[str, Any]:
    return {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": _MERGE,
        "image_mean": mean,
        "image_std": std,
    }


def _sizes(shortest: int, longest: int) -> dict[str, Any]:
    return {"size": {"shortest_edge": shortest, "longest_edge": longest}}


_QWEN2_5_PATCHES = _patches(14, [0.48, 0.45, 0.40], [0.26, 0.26, 0.27]) | {
    "min_pixels": 3136,
    "max_pixels": 28 * 28 * 64,
}
_QWEN3_PATCHES = _patches(16, [0.5] * 3, [0.5] * 3)
_PROCESSORS: Mapping[FamilyName, dict[str, dict[str, Any]]] = {
    "qwen2_5_vl": {
        "preprocessor_config": _QWEN2_5_PATCHES
        | {
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2_5_VLProcessor",
        },
        "video_preprocessor_config": _QWEN2_5_PATCHES
        | {"video_processor_type": "Qwen2VLVideoProcessor"},
    },
    "qwen3_vl": {
        "preprocessor_config": _QWEN3_PATCHES
        | _sizes(32 * 32, 32 * 32 * 64)
        | {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
        },
        "video_preprocessor_config": _QWEN3_PATCHES
        | _sizes(32 * 32 * 2, 32 * 32 * 64 * 8)
        | {"video_processor_type": "Qwen3VLVideoProcessor"},
    },
    "gemma3": {
        "preprocessor_config": {
            "do_resize": True,
            "size": {"height": 56, "width": 56},
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "image_seq_length": 4,
            "image_processor_type": "Gemma3ImageProcessor",
            "processor_class": "Gemma3Processor",
        },
        "processor_config": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    },
}


def make_vision_model(directory: Path, family: FamilyName) -> Path:
    """Write a model of ``family`` with its tokenizer and processors; return ``directory``."""
    from safetensors.numpy import save_file  # noqa: PLC0415 - only tests with a model need it

    directory.mkdir(parents=True, exist_ok=True)
    weights = vision_weights.random_weights(family)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID, "pad_token_id": 3}
    files = {
        "config": _CONFIG[family],
        "generation_config": generation,
        "tokenizer_config": _tokenizer_config(family),
        **_PROCESSORS[family],
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1))
    (directory / "tokenizer.json").write_text(_tokenizer())
    return directory


def widen_heads(directory: Path) -> Path:
    """Halve the number of a Qwen3-VL's text heads: vLLM's on a CPU have 32 numbers or more."""
    from safetensors.numpy import load_file, save_file  # noqa: PLC0415 - only few tests need it

    config = json.loads((directory / "config.json").read_text())
    text = config["text_config"]
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    text["rope_parameters"]["mrope_section"] = [8, 4, 4]
    (directory / "config.json").write_text(json.dumps(config))
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = np.concatenate([tensor, tensor])
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _tokenizer_config(family: FamilyName) -> dict[str, Any]:
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT_LENGTH,
        "chat_template": _TEMPLATE.replace("IMAGE", _IMAGE[family]).replace("VIDEO", _VIDEO),
    }
    if family == "gemma3":
        tokens = {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        }
        config |= tokens | {"extra_special_tokens": tokens}
    return config


@functools.cache
def _tokenizer() -> str:
    """Train byte-level BPE on the standard library's sources, so that any text round-trips."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:_CORPUS_FILES]
    tokenizer.train([str(source) for source in sources], trainer)
    trained: str = tokenizer.to_str()
    return trained


# ---- pictures and clips -------------------------------------------------------------------------


def picture(width: int = 64, height: int = 64, *, seed: int = 0) -> Frames:
    """Draw a picture of coloured tiles; another seed is another picture."""
    pixels = _tiles(1, width, height, seed)
    return Frames(
        modality=Modality.IMAGE, width=width, height=height, data=memoryview(pixels.tobytes())
    )


def clip(
    frames: int = 4, width: int = 64, height: int = 64, *, fps: float = 4.0, seed: int = 0
) -> Frames:
    """Draw a video of coloured tiles, all of whose frames are read."""
    pixels = _tiles(frames, width, height, seed)
    return Frames(
        modality=Modality.VIDEO,
        width=width,
        height=height,
        data=memoryview(pixels.tobytes()),
        count=frames,
        fps=fps,
        total_frames=frames,
        indices=tuple(range(frames)),
    )


def _tiles(frames: int, width: int, height: int, seed: int) -> np.ndarray:
    """Draw 4 x 4 tiles a frame: noise would look the same to a tower that averages patches."""
    shape = (frames, _TILES, _TILES, 3)
    colours = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    rows = np.arange(height) * _TILES // height
    columns = np.arange(width) * _TILES // width
    return np.ascontiguousarray(colours[:, rows][:, :, columns])


def as_array(frames: Frames) -> np.ndarray:
    """Return [frames, height, width, 3] bytes."""
    shape = (frames.count, frames.height, frames.width, 3)
    return np.frombuffer(frames.data, np.uint8).reshape(shape).copy()


def as_png(image: Frames) -> bytes:
    """Write a picture as a PNG file, without loss."""
    from PIL import Image  # noqa: PLC0415 - only some tests need files

    file = io.BytesIO()
    Image.fromarray(as_array(image)[0]).save(file, "PNG")
    return file.getvalue()


# ---- what transformers says ---------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceModel:
    """A model and its processor in transformers, float32 on the CPU."""

    model: Any
    processor: Any

    def inputs(
        self, text: str, images: Sequence[Frames] = (), videos: Sequence[Frames] = ()
    ) -> dict[str, Any]:
        """Run the processor over a rendered prompt."""
        import torch  # noqa: PLC0415
        from transformers.video_utils import VideoMetadata  # noqa: PLC0415

        media: dict[str, Any] = {}
        if images:
            media["images"] = [as_array(image)[0] for image in images]
        if videos:
            media["videos"] = [
                torch.from_numpy(as_array(video)).permute(0, 3, 1, 2) for video in videos
            ]
            media["do_sample_frames"] = False
            media["video_metadata"] = [
                VideoMetadata(
                    total_num_frames=video.total_frames,
                    fps=video.fps,
                    duration=video.total_frames / video.fps,
                    frames_indices=list(video.indices),
                )
                for video in videos
            ]
        return dict(
            self.processor(text=[text], return_tensors="pt", add_special_tokens=False, **media)
        )


@dataclass(frozen=True)
class ReferenceAnswer:
    """What the identity tests compare with."""

    prompt_ids: list[int]
    """With the placeholders expanded."""
    token_ids: list[int]
    """Greedy; the end-of-sequence token doesn't end it."""


@functools.cache
def reference_model(directory: Path) -> ReferenceModel:
    """Load a model of `make_vision_model` in this process, once."""
    from millstream_server.engines import torch_on_cpu  # noqa: PLC0415 - for torchvision

    # What `prepare` sets is not for the processes that tests start.
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")  # the vendors' own
        torch_on_cpu.prepare()
        import transformers  # noqa: PLC0415

        processor = transformers.AutoProcessor.from_pretrained(directory)
        model = transformers.AutoModelForImageTextToText.from_pretrained(
            directory, dtype="float32"
        ).eval()
    model.generation_config.eos_token_id = None
    if model.config.model_type == "qwen2_5_vl":
        model.model.get_rope_index = after_videos(model.model.get_rope_index)
    return ReferenceModel(model, processor)


def after_videos(get_rope_index: Callable[..., Any]) -> Callable[..., Any]:
    """Mend transformers' positions of text after a video: they follow the video's last one.

    Qwen2.5-VL was trained so, and transformers had it so up to 5.2. Since 5.3 such text begins
    after the video's height or width, so that a longer video's positions overlap it.
    """

    def positions(input_ids: Any, mm_token_type_ids: Any, **inputs: Any) -> tuple[Any, Any]:
        found, deltas = get_rope_index(input_ids, mm_token_type_ids=mm_token_type_ids, **inputs)
        kinds = mm_token_type_ids[0].tolist()
        for index in range(1, len(kinds)):
            if kinds[index - 1] and not kinds[index]:
                found[..., index:] += found[..., :index].max() + 1 - found[..., index].min()
        return found, deltas * 0 + found.max() + 1 - len(kinds)

    return positions


def rendered(directory: Path, messages: Sequence[Mapping[str, Any]]) -> str:
    """Render a conversation by the model's chat template, up to the assistant's turn."""
    tokenizer = reference_model(directory).processor.tokenizer
    text: str = tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return text


def reference_answer(
    directory: Path,
    prompt: str | Sequence[Mapping[str, Any]],
    images: Sequence[Frames] = (),
    videos: Sequence[Frames] = (),
    n: int = 8,
) -> ReferenceAnswer:
    """Return transformers' own greedy answer of ``n`` tokens to a rendered text or messages."""
    reference = reference_model(directory)
    text = prompt if isinstance(prompt, str) else rendered(directory, prompt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        inputs = reference.inputs(text, images, videos)
        output = reference.model.generate(**inputs, max_new_tokens=n, do_sample=False)
    prompt_ids = inputs["input_ids"][0].tolist()
    return ReferenceAnswer(prompt_ids, output[0].tolist()[len(prompt_ids) :])
