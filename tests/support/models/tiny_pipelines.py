"""Tiny pipelines of diffusers with random weights, made in a second or two, always the same.

What they draw is noise; but every part of them acts: prompt, negative prompt, seed, steps, sizes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from millstream_server.engines import torch_on_cpu
from tests.support.models.models import byte_level_model

_VOCAB = 440
_WIDTH = 64


class TinyPipelines:
    """The folders of the pipelines, each written when a test first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @functools.cached_property
    def image(self) -> Path:
        """A Z-Image pipeline for 16 x 16 and up."""
        return self._written("image", _image_pipeline)

    @functools.cached_property
    def video(self) -> Path:
        """A Wan pipeline for 16 x 16 and up, frames one more than a multiple of 4."""
        return self._written("video", _video_pipeline)

    def _written(self, name: str, make: Callable[[], Any]) -> Path:
        with for_vendors():
            make().save_pretrained(self._folder / name)
        return self._folder / name


@contextlib.contextmanager
def for_vendors() -> Iterator[None]:
    """Let diffusers be imported and run here, with its warnings."""
    # What `prepare` sets is not for the processes that other tests start.
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        torch_on_cpu.prepare()  # for torchvision, which transformers imports
        yield


def _image_pipeline() -> Any:
    import diffusers  # noqa: PLC0415 - seconds, for these tests only
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(1)
    text_config = transformers.Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=_WIDTH,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        initializer_range=0.3,
    )
    transformer = diffusers.ZImageTransformer2DModel(
        all_patch_size=(2,),
        all_f_patch_size=(1,),
        in_channels=16,
        dim=_WIDTH,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=_WIDTH,
        axes_dims=[8, 12, 12],
        axes_lens=[1536, 512, 512],
    )
    # These two are given other names in the file than the constructor has.
    transformer.register_to_config(num_layers=2, num_attention_heads=2)
    _draw(transformer)
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        scaling_factor=0.5,
        shift_factor=0.1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=transformers.Qwen3Model(text_config).eval(),
        tokenizer=_tokenizer(),
        transformer=transformer,
    )


def _video_pipeline() -> Any:
    import diffusers  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(2)
    text_config = transformers.UMT5Config(
        vocab_size=_VOCAB, d_model=_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4
    )
    transformer = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=16,
        out_channels=16,
        text_dim=_WIDTH,
        freq_dim=32,
        ffn_dim=96,
        num_layers=2,
        cross_attn_norm=True,
        rope_max_seq_len=64,
    )
    _draw(transformer)
    return diffusers.WanPipeline(
        tokenizer=_tokenizer(),
        text_encoder=transformers.UMT5EncoderModel(text_config).eval(),
        vae=diffusers.AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=transformer,
    )


def _tokenizer() -> Any:
    import transformers  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        return transformers.AutoTokenizer.from_pretrained(byte_level_model(Path(folder)))


def _draw(model: Any) -> None:
    """Draw every parameter: diffusers leaves some of them uninitialised or 0."""
    import torch  # noqa: PLC0415

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name and name.endswith("weight"):
                continue
            torch.nn.init.normal_(parameter, std=0.15)
