"""The settings of SGLang's diffusion engine, and its configuration made from them."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.sglang import managed as managed_arguments
from millstream_server.engines.sglang.arguments import importing
from millstream_server.engines.sglang.diffusion.config import INDEX, SglangDiffuserConfig
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import EngineArguments, SettingsError, setting
from millstream_server.runtime.settings.arguments import ArgumentList, read_arguments

# Of its command line, flags of any part's name: --<part>-path and so on.
_ONLY_IN_FILE = (
    "component_paths",
    "component_weights_paths",
    "component_quantizations",
    "component_precisions",
    "component_direct_gpu_weight_loading",
    "component_quantization_ignored_layers",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangDiffusionSettings:
    """Settings that only SGLang's diffusion engine reads."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "engine_log_level": "give SGLang's own argument: -- --log-level LEVEL",
    }

    model_id: str = setting(
        "",
        help="sglang: published name of the model, as Z-Image-Turbo; empty: by the folder's name "
        "or the pipeline's class",
    )
    num_gpus: int = setting(1, help="sglang: GPUs that one output is spread over")
    cancel_timeout_s: float = setting(
        10.0,
        help="sglang: an engine that goes on so long after a cancel is killed and started again; "
        "at least three times its longest step",
    )
    engine_args: EngineArguments = setting(
        EngineArguments(), help="the engine's own arguments: behind --, not as a flag"
    )

    def checked(self, device: Literal["auto", "cpu", "cuda"]) -> Self:
        """Return the settings with the engine's own arguments read.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us.
        """
        on_cpu = device == "cpu" or (device == "auto" and not sglang_cpu.gpu_present())
        known = ArgumentList(
            engine="SGLang's diffusion engine",
            managed=managed_arguments.DIFFUSION,
            add_to=partial(_server_arguments, on_cpu=on_cpu),
            only_in_file=_ONLY_IN_FILE,
        )
        return replace(self, engine_args=read_arguments(self.engine_args, known))


def _server_arguments(parser: argparse.ArgumentParser, *, on_cpu: bool) -> Mapping[str, str]:
    """Add the arguments; return those that can't be given to `DiffGenerator.from_pretrained`."""
    with importing(on_cpu=on_cpu):
        module: Any = importlib.import_module(
            "sglang.multimodal_gen.runtime.server_args.server_args"
        )
    module.ServerArgs.add_cli_args(parser)
    fields = {f.name for f in dataclasses.fields(module.ServerArgs)}
    actions = parser._actions  # noqa: SLF001 - argparse has no other list
    names = {action.dest for action in actions}
    return dict.fromkeys(names - fields, "SGLang takes it on its own command line only")


def diffuser_config(
    settings: SglangDiffusionSettings,
    model_path: Path | None,
    *,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    warm_up_timeout_s: float = 300.0,
) -> SglangDiffuserConfig:
    """Make the configuration of one engine.

    Raises:
        SettingsError: the settings contradict each other.
    """
    if model_path is None:
        raise SettingsError("--model-path is required with SGLang: a pipeline's folder")
    expect_weights(model_path)
    if not (model_path / INDEX).is_file():
        raise SettingsError(f"--model-path {model_path}: there is no {INDEX} in it")
    if settings.num_gpus < 1:
        raise SettingsError(f"--num-gpus is {settings.num_gpus}, not 1 or more")
    if settings.cancel_timeout_s <= 0:
        raise SettingsError(f"--cancel-timeout-s is {settings.cancel_timeout_s:g}, not above 0")
    own = dict(settings.engine_args.values)
    return SglangDiffuserConfig(
        model_path=model_path,
        model_id=settings.model_id,
        device=device,
        num_gpus=settings.num_gpus,
        warm_up_timeout_s=warm_up_timeout_s,
        cancel_timeout_s=settings.cancel_timeout_s,
        log_level=own.pop("log_level", "warning"),
        extra=own,  # what is left
    )
