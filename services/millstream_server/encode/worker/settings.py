"""Settings of EncodeService, wherever it is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from millstream_server.encode.encoder import MediaEncoder
from millstream_server.encode.transfer.settings import EmbeddingStoreSettings
from millstream_server.encode.transfer.store import EmbeddingStore
from millstream_server.encode.worker.pipeline import HostedEncoder, PipelineOptions
from millstream_server.media.items import MediaLimits
from millstream_server.runtime.settings import SettingsError, group, setting

_LIMITS = MediaLimits()
_PIPELINE = PipelineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """Limits of files, and what runs at once."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "batch_patches": "leave it out: a batch has at most 16384 patches",
        "decoder_memory_bytes": "leave it out: a decoder process may have 2 GiB",
        "decoder_timeout_s": "leave it out: a file may take 20 s",
        "max_decoded_bytes": "leave it out: the frames of a file may have 1 GiB",
        "max_upload_bytes": "leave it out: files that are held may have 1 GiB",
        "max_video_frames": "leave it out: a video may have 20000 frames; set --max-video-s",
        "prepare_threads": "leave it out: two items are prepared at once",
        "video_fps": "leave it out: 2 frames are read per second, as the models were trained",
        "upload_idle_s": "leave it out: the next bytes of a file may take 10 s",
    }

    max_item_bytes: int = setting(_LIMITS.max_item_bytes, help="most bytes of a file (64 MiB)")
    max_pixels: int = setting(
        _LIMITS.max_pixels, help="most pixels of an image, or of a video's frame: width x height"
    )
    max_frames: int = setting(
        _LIMITS.max_frames,
        help="most frames that are read of a video; a longer one is sampled evenly",
    )
    max_video_s: float = setting(_LIMITS.max_video_s, help="longest video")
    decoder_processes: int = setting(
        _PIPELINE.decoders, help="files that are decoded at once, each in a process"
    )
    store: EmbeddingStoreSettings = group(EmbeddingStoreSettings)

    def hosted(self, encoder: MediaEncoder) -> HostedEncoder:
        """Make a hosted encoder; nothing is loaded yet.

        Raises:
            SettingsError: a number that must be at least 1 is 0.
        """
        for name in ("decoder_processes", "max_frames"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')}: must be at least 1")
        limits = MediaLimits(
            max_item_bytes=self.max_item_bytes,
            max_pixels=self.max_pixels,
            max_frames=self.max_frames,
            max_video_s=self.max_video_s,
        )
        return HostedEncoder(
            encoder,
            EmbeddingStore(self.store.embedding_store_bytes),
            PipelineOptions(limits=limits, decoders=self.decoder_processes),
        )
