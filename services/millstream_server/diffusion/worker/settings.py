"""Settings of a worker that makes images or videos."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.diffusion.request import Kind
from millstream_server.diffusion.worker.engine import DiffusionOptions, HostedDiffuser
from millstream_server.diffusion.worker.files import Storage
from millstream_server.runtime.settings import SettingsError, setting

_OPTIONS = DiffusionOptions()
_STORAGE_TIMEOUT_S = 60.0
"""To write an output: a video of 100 MB at 2 MB/s; then the storage hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionWorkerSettings:
    """Limits, the queue, storage."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "decoder_processes": "leave it out: one input image is decoded at once",
        "max_input_bytes": "leave it out: an input image's file may have 16 MiB",
        "storage_timeout_s": "leave it out: an output may take 60 s to be written",
    }

    requests_at_once: int = setting(
        _OPTIONS.requests_at_once,
        help="requests that each Processor sends at once: one runs, the others wait here, so that "
        "the device has no pause between two; all further ones wait at the Processors, where "
        "priorities count and another worker may take them",
    )
    max_open_pixel_steps: int = setting(
        0,
        help="most pixels x frames x steps x outputs of all open requests; 0: as many as 64 "
        "requests have that set nothing",
    )
    max_steps: int = setting(_OPTIONS.max_steps, help="most steps; 0: the model's")
    max_pixels: int = setting(
        _OPTIONS.max_pixels, help="most pixels of an output: width x height; 0: the model's"
    )
    max_outputs: int = setting(_OPTIONS.max_outputs, help="most outputs of a request")
    max_frames: int = setting(_OPTIONS.max_frames, help="most frames of a video; 0: the model's")
    default_steps: int = setting(
        _OPTIONS.default_steps, help="steps of requests that name none; 0: the model's"
    )
    default_width: int = setting(
        _OPTIONS.default_width, help="width of requests that name no size; 0: the model's"
    )
    default_height: int = setting(
        _OPTIONS.default_height, help="height of requests that name no size; 0: the model's"
    )
    storage_url: str = setting(
        "",
        help="where outputs are written that are delivered as URLs: any fsspec URL, such as "
        "s3://bucket/folder or file:///folder; empty: such requests are refused",
    )
    storage_public_url: str = setting(
        "", help="URL under which callers find what is in --storage-url; empty: --storage-url"
    )

    def hosted(self, diffuser: Diffuser, kind: Kind) -> HostedDiffuser:
        """Make a hosted engine; nothing is loaded yet.

        Raises:
            SettingsError: a number that must be at least 1 is 0, or the storage can't be used.
        """
        for name in ("requests_at_once", "max_outputs"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name.replace('_', '-')}: must be at least 1")
        if bool(self.default_width) != bool(self.default_height):
            raise SettingsError("--default-width and --default-height: set both or neither")
        if self.storage_public_url and not self.storage_url:
            raise SettingsError("--storage-public-url needs --storage-url")
        options = DiffusionOptions(
            kind=kind,
            requests_at_once=self.requests_at_once,
            max_steps=self.max_steps,
            max_pixels=self.max_pixels,
            max_outputs=self.max_outputs,
            max_frames=self.max_frames,
            default_steps=self.default_steps,
            default_width=self.default_width,
            default_height=self.default_height,
            storage=self._storage(),
        )
        return HostedDiffuser(diffuser, options)

    def _storage(self) -> Storage | None:
        if not self.storage_url:
            return None
        return Storage(self.storage_url, self.storage_public_url, _STORAGE_TIMEOUT_S)
