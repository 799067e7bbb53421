"""Settings of LoRA adapters."""

from __future__ import annotations

from dataclasses import dataclass

from millstream_server.engines.sglang.config import LORA_MODULES
from millstream_server.runtime.settings import EngineArguments, SettingsError, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """Which adapters can be loaded at runtime; the memory for them is taken at the start."""

    max_loras_per_batch: int = setting(
        0,
        help="LoRA adapters that requests in one batch may use; more can be loaded; 0: none, and "
        "no cost",
    )
    max_lora_rank: int = setting(16, help="largest rank of an adapter; memory grows with it")
    lora_target_modules: tuple[str, ...] = setting(
        LORA_MODULES, help="layers that adapters may change, separated by commas"
    )

    def check(self, arguments: EngineArguments) -> None:
        """Check these settings, with SGLang's own arguments.

        Raises:
            SettingsError: they contradict each other.
        """
        if self.max_loras_per_batch < 0:
            raise SettingsError(f"--max-loras-per-batch is {self.max_loras_per_batch}, not 0 or up")
        if not self.max_loras_per_batch:
            return
        if self.max_lora_rank < 1:
            raise SettingsError(f"--max-lora-rank is {self.max_lora_rank}, not 1 or up")
        if not self.lora_target_modules:
            raise SettingsError("--lora-target-modules is empty: name the layers, such as q_proj")
        if (ranks := arguments.values.get("dp_size", 1)) != 1:
            raise SettingsError(
                f"--max-loras-per-batch: SGLang can't load adapters with --dp-size {ranks}; start "
                "more workers instead"
            )
