"""Settings of a decode worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream_server.engines.base import Role
from millstream_server.runtime.settings import group, setting
from millstream_server.worker.encoding.settings import EncodingSettings
from millstream_server.worker.settings import WorkerSettings


class DecodeMode(enum.Enum):
    """Where the prompt's KV cache comes from."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings(WorkerSettings):
    """Read by `python -m millstream_server.decode`."""

    mode: DecodeMode = setting(
        DecodeMode.AGGREGATED,
        help="aggregated: run prompts here; disaggregated: take their KV from prefill workers",
    )
    encode_media: bool = setting(
        default=True,
        help="aggregated: encode the images and videos of its own prompts, if the model takes any "
        "and MILLSTREAM_TICKET_KEY is set; not used while encode workers are connected",
    )
    encoding: EncodingSettings = group(EncodingSettings)

    @property
    def role(self) -> Role:
        """The worker's role in this mode."""
        return Role.AGGREGATED if self.mode is DecodeMode.AGGREGATED else Role.DECODE
