"""Settings of a decode worker."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from millstream_server.runtime.settings import setting
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
