"""Settings of EncodeService, wherever it is served."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.encoding.encoder import MediaEncoder
from millstream_server.media.items import MediaLimits
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
