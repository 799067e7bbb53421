"""Settings of EncodeService, wherever it is served."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.encode.encoder import MediaEncoder
from millstream_server.encode.transfer.settings import EmbeddingStoreSettings
from millstream_server.encode.transfer.store import EmbeddingStore
from millstream_server.encode.worker.pipeline import HostedEncoder, PipelineOptions
from millstream_server.media.items import MediaLimits
from millstream_server.runtime.lifecycle.python import lacking
from millstream_server.runtime.settings import SettingsError, group, setting

_LIMITS = MediaLimits()
_PIPELINE = PipelineOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingSettings:
    """Limits of files, and what runs at once."""

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
            SettingsError: a number that must be at least 1 is 0, or what decodes isn't installed.
        """
        if why := lacking("PIL", "av"):
            raise SettingsError(why)
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
