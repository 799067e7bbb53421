"""Settings of EncodeService, wherever it is served."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang import tower as sglang
from millstream_server.engines.transformers.encoder import TowerEncoder
from millstream_server.engines.transformers.pixels import NoTower
from millstream_server.engines.transformers.tower import TowerConfig
from millstream_server.engines.transformers.vision import TransformersTower
from millstream_server.media import families
from millstream_server.media.items import Content, MediaLimits
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError, group, setting
from millstream_server.transfer.embeddings.settings import EmbeddingStoreSettings
from millstream_server.transfer.embeddings.store import EmbeddingStore
from millstream_server.worker.encoding.core import EncodeOptions
from millstream_server.worker.encoding.pipeline import HostedEncoder, PipelineOptions

_LIMITS = MediaLimits()
_OPTIONS = EncodeOptions()
_PIPELINE = PipelineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """Limits of files, and what runs at once."""

    max_item_bytes: int = setting(_LIMITS.max_item_bytes, help="most bytes of a file (64 MiB)")
    max_pixels: int = setting(
        _LIMITS.max_pixels, help="most pixels of an image, or of a video's frame: width x height"
    )
    max_decoded_bytes: int = setting(
        _LIMITS.max_decoded_bytes,
        help="most bytes of the frames that are read of a file, width x height x 3 each (1 GiB)",
    )
    max_frames: int = setting(
        _LIMITS.max_frames,
        help="most frames that are read of a video; a longer one is sampled evenly",
    )
    max_video_frames: int = setting(
        _LIMITS.max_video_frames, help="most frames that a video may have"
    )
    max_video_s: float = setting(_LIMITS.max_video_s, help="longest video")
    video_fps: float = setting(_LIMITS.fps, help="frames read per second of video")
    decoder_timeout_s: float = setting(
        _LIMITS.decode_timeout_s, help="a decoder process that takes longer for a file is killed"
    )
    decoder_memory_bytes: int = setting(
        _LIMITS.decode_memory_bytes, help="address space of a decoder process (2 GiB)"
    )
    decoder_processes: int = setting(
        _PIPELINE.decoders, help="files that are decoded at once, each in a process"
    )
    prepare_threads: int = setting(
        _PIPELINE.prepare_threads, help="items that the model's processor prepares at once"
    )
    batch_patches: int = setting(
        _PIPELINE.batch_patches,
        help="most patches that go through the vision tower at once; a larger item goes alone",
    )
    max_upload_bytes: int = setting(
        _OPTIONS.max_upload_bytes, help="most bytes of files that are held (1 GiB)"
    )
    upload_idle_s: float = setting(
        _OPTIONS.upload_idle_s, help="longest wait for the next bytes of a file"
    )
    store: EmbeddingStoreSettings = group(EmbeddingStoreSettings)

    @property
    def options(self) -> EncodeOptions:
        """Limits of the service."""
        return EncodeOptions(
            max_upload_bytes=self.max_upload_bytes,
            upload_idle_s=self.upload_idle_s,
            lease_s=self.store.embedding_lease_s,
        )

    def hosted(self, encoder: MediaEncoder) -> HostedEncoder:
        """Make a hosted encoder; nothing is loaded yet.

        Raises:
            SettingsError: a number that must be at least 1 is 0.
        """
        for name in ("decoder_processes", "prepare_threads", "batch_patches", "max_frames"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')}: must be at least 1")
        store = EmbeddingStore(
            self.store.embedding_store_bytes, cached_bytes=self.store.cached_bytes
        )
        return HostedEncoder(
            encoder,
            store,
            PipelineOptions(
                limits=self._limits,
                decoders=self.decoder_processes,
                prepare_threads=self.prepare_threads,
                batch_patches=self.batch_patches,
            ),
        )

    @property
    def _limits(self) -> MediaLimits:
        return MediaLimits(
            max_item_bytes=self.max_item_bytes,
            max_pixels=self.max_pixels,
            max_frames=self.max_frames,
            max_video_frames=self.max_video_frames,
            max_video_s=self.max_video_s,
            fps=self.video_fps,
            max_decoded_bytes=self.max_decoded_bytes,
            decode_timeout_s=self.decoder_timeout_s,
            decode_memory_bytes=self.decoder_memory_bytes,
        )


class TowerKind(enum.Enum):
    """Whose vision tower encodes."""

    AUTO = "auto"
    """SGLang's where it can run the model's tower apart from an engine (the Qwen families), as
    engines of SGLang then get the rows that they would make themselves; else that of transformers.
    """
    SGLANG = "sglang"
    TRANSFORMERS = "transformers"
    SIMULATED = "simulated"
    """No tower and no model: `engines.simulated.encoder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings:
    """Settings of an encoder."""

    tower: TowerKind = setting(
        TowerKind.AUTO,
        help="whose vision tower runs: sglang, transformers, simulated, or auto: sglang for the "
        "families that it encodes (Qwen2.5-VL, Qwen3-VL), else transformers",
    )
    device: Literal["auto", "cuda", "cpu"] = setting("auto", help="auto, cuda or cpu")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto",
        help="type of the tower and its embeddings; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    max_item_tokens: int = setting(
        16384, help="most tokens of an image or a video; a larger one is refused"
    )
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")


def make_encoder(
    settings: EncoderSettings, model_path: Path, content: Content = Content.ROWS
) -> MediaEncoder:
    """Make the encoder that ``settings`` name; nothing is loaded yet.

    With `Content.PIXELS` no tower runs: for the worker whose engine has the tower. Start such an
    encoder after the engine.

    Raises:
        SettingsError: the model reads no images, or the tower can't run its family.
    """
    expect_weights(model_path)
    try:
        family = families.load(model_path)
    except families.UnusableFamilyError as error:
        raise SettingsError(f"--model-path: {error}") from error
    if family is None:
        raise SettingsError(f"--model-path {model_path}: the model reads text only")
    if not sglang_cpu.gpu_present():
        sglang_cpu.activate()  # for torchvision too, which the image processors import
    config = TowerConfig(
        model_path=model_path,
        device=settings.device,
        dtype=settings.dtype,
        max_item_tokens=settings.max_item_tokens,
        warm_up_timeout_s=settings.warm_up_timeout_s,
    )
    if content is Content.PIXELS:
        return TowerEncoder(config, NoTower(config))
    kind = settings.tower
    if kind is TowerKind.AUTO:
        kind = TowerKind.SGLANG if sglang.supports(family) else TowerKind.TRANSFORMERS
    if kind is TowerKind.TRANSFORMERS:
        return TowerEncoder(config, TransformersTower(config))
    tower = sglang.SglangTower(config)
    problem = tower.supports(family)
    if problem is not None:
        raise SettingsError(f"--tower {kind.value}: {problem}")
    return TowerEncoder(config, tower)
