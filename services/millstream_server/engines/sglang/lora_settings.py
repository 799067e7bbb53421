"""Settings of LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from millstream_server.runtime.settings import EngineArguments, SettingsError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which adapters can be loaded at runtime; the memory for them is taken at the start.

    Their largest rank and the layers that they may change are SGLang's own arguments.
    """

    REMOVED: ClassVar[Mapping[str, str]] = {
        "lora_target_modules": "give SGLang's own argument: -- --lora-target-modules NAME …",
        "max_lora_rank": "give SGLang's own argument: -- --max-lora-rank RANK",
    }

    max_loras_per_batch: int = setting(
        0,
        help="LoRA adapters that requests in one batch may use; more can be loaded; 0: none, and "
        "no cost",
    )

    def check(self, arguments: EngineArguments) -> None:
        """Check these settings, with SGLang's own arguments.

        Raises:
            SettingsError: they contradict each other.
        """
        if self.max_loras_per_batch < 0:
            raise SettingsError(f"--max-loras-per-batch is {self.max_loras_per_batch}, not 0 or up")
        values = arguments.values
        rank, modules = values.get("max_lora_rank"), values.get("lora_target_modules")
        if not self.max_loras_per_batch:
            if rank is not None or modules is not None:
                raise SettingsError(
                    "-- --max-lora-rank and --lora-target-modules need --max-loras-per-batch"
                )
            return
        if rank is not None and rank < 1:
            raise SettingsError(f"-- --max-lora-rank is {rank}, not 1 or up")
        if modules is not None and (not modules or "all" in modules):
            raise SettingsError("-- --lora-target-modules: name the layers, such as q_proj v_proj")
        if (ranks := values.get("dp_size", 1)) != 1:
            raise SettingsError(
                f"--max-loras-per-batch: SGLang can't load adapters with --dp-size {ranks}; start "
                "more workers instead"
            )
