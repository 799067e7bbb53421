"""SGLang's own arguments, as its own command line reads them, without those that we set.

SGLang is imported only when there are arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import difflib
import importlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from millstream_server.engines.sglang import cpu as sglang_cpu
from millstream_server.engines.torch_on_cpu import resolved
from millstream_server.runtime.settings import EngineArguments, ReadArgument, SettingsError

# ---- arguments that an operator can't set, and the settings of ours that do ----------------------

_TEXT = "SGLang sees token ids only; the Processor turns text into them"
_HTTP = "SGLang's HTTP server isn't started"
_OURS = "Millstream sets it"
_FILE = "write SGLang's arguments into engine_args of our file, --config"

_EVERYWHERE: Mapping[str, str] = {
    "config": _FILE,
    "model_path": "--model-path",
    "served_model_name": "--model-name",
    "device": "--device",
    "log_level": "--engine-log-level",
    "enable_metrics": "--metrics-listen",
    "host": "--listen",
    "port": "--listen",
    "api_key": _HTTP,
    "admin_api_key": _HTTP,
    "log_level_http": _HTTP,
    "ssl_keyfile": "--tls-key-file",
    "ssl_certfile": "--tls-cert-file",
    "ssl_ca_certs": "--tls-client-ca-file",
    "ssl_keyfile_password": _HTTP,
}

VECTORS: Mapping[str, str] = {
    **_EVERYWHERE,
    "dtype": "--dtype",
    "max_total_tokens": "--max-total-tokens",
    "max_running_requests": "--max-running-requests",
    "context_length": "--context-length",
    "is_embedding": _OURS,
    "skip_tokenizer_init": _OURS,
    "incremental_streaming_output": _OURS,
    "disaggregation_mode": "vectors are made by one worker alone",
    "enable_trace": "traces of embedding workers are Millstream's own",
    "otlp_traces_endpoint": "traces of embedding workers are Millstream's own",
    "nnodes": "--nodes",
    "node_rank": "--node-rank",
    "dist_init_addr": "--leader-address",
    "chat_template": _TEXT,
    "completion_template": _TEXT,
    "reasoning_parser": _TEXT,
    "tool_call_parser": _TEXT,
}
"""Of an embedding worker's engine."""

GENERATION: Mapping[str, str] = {
    **VECTORS,
    "is_embedding": "`python -m millstream_server.embedding` serves embedding models",
    "host": "--bootstrap-host",
    "skip_tokenizer_init": "--engine-tokenizer",
    "disaggregation_mode": "it follows from the service and, of a decode worker, from --mode",
    "disaggregation_bootstrap_port": "--bootstrap-port",
    "disaggregation_transfer_backend": "--transfer-backend",
    "enable_trace": "--otlp-endpoint",
    "otlp_traces_endpoint": "--otlp-endpoint",
    "enable_deterministic_inference": "--deterministic",
    "kv_events_config": "--kv-events and WorkerService.WatchKvEvents",
    "reasoning_parser": "--reasoning-parser",
    "tool_call_parser": "--tool-call-parser",
    "enable_multimodal": "it follows from the model",
    "enable_adaptive_dispatch_to_encoder": _OURS,
    "enable_lora": "--max-loras-per-batch",
    "max_loras_per_batch": "--max-loras-per-batch",
    "max_lora_rank": "--max-lora-rank",
    "lora_target_modules": "--lora-target-modules",
    "lora_paths": "load adapters with LoadLora (`millstream admin`)",
    "max_loaded_loras": "SGLang would remove adapters by itself",
    "enable_memory_saver": "--memory-saver",
    "enable_weights_cpu_backup": "--memory-saver",
    "dllm_algorithm": "--dllm-algorithm of `python -m millstream_server.diffusion --kind text`",
    "dllm_algorithm_config": "--dllm-config of `python -m millstream_server.diffusion --kind text`",
}
"""Of the engine of a prefill or decode worker, or of one that makes text by diffusion."""

DIFFUSION: Mapping[str, str] = {
    **_EVERYWHERE,
    "nnodes": "a diffusion worker runs on one machine",
    "node_rank": "a diffusion worker runs on one machine",
    "model_id": "--model-id",
    "num_gpus": "--num-gpus",
    "backend": _OURS,
    "sleep_on_idle": _OURS,
    "warmup_mode": "Millstream warms up itself, --warm-up-timeout-s",
    "output_path": "--storage-url",
    "input_save_path": "nothing is written to files",
    "enable_trace": "traces of diffusion workers are Millstream's own",
    "otlp_traces_endpoint": "traces of diffusion workers are Millstream's own",
    "webui": _HTTP,
    "webui_port": _HTTP,
}
"""Of SGLang's engine for images and videos."""
# Of its diffusion engine's command line: flags of any part's name, --<part>-path and so on.
_ONLY_IN_FILE = (
    "component_paths",
    "component_weights_paths",
    "component_quantizations",
    "component_precisions",
    "component_direct_gpu_weight_loading",
    "component_quantization_ignored_layers",
)

# ---- the others ----------------------------------------------------------------------------------

_SECRET = re.compile(r"(^|_)(api_key|password|secret|watermark_key\w*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentList:
    """An engine's arguments."""

    engine: str
    """Its name in errors."""
    managed: Mapping[str, str]
    """Arguments that we set, and the setting of ours to use, or why there is none."""
    add_to: Callable[[argparse.ArgumentParser], Mapping[str, str]]
    """Adds all of them to a parser; imports the engine. Returns more for `managed`."""
    only_in_file: Collection[str] = ()
    """Arguments without a flag: mappings, passed on as they are."""


def read_arguments(given: EngineArguments, known: ArgumentList) -> EngineArguments:
    """Return the arguments with what the engine's parser made of them.

    Raises:
        SettingsError: an argument is unknown, wrong, or managed by us; or the engine isn't
            installed.
    """
    if not given.given:
        return given
    parser = _Parser(known)
    try:
        further = known.add_to(parser)
    except ImportError as error:
        raise SettingsError(
            f"{known.engine} can't be imported, so its arguments can't be checked: {error}"
        ) from error
    parser.ready({**further, **known.managed})
    read: dict[str, ReadArgument] = {}
    for name in known.only_in_file:
        if name in given.file:
            value = given.file[name]
            read[name] = ReadArgument(value, value, "file")
    words = [
        word
        for name, value in given.file.items()
        if name not in known.only_in_file
        for word in parser.words(name, value)
    ]
    sources = (("file", words), ("environment", given.environment), ("flag", given.flags))
    for source, each in sources:
        read |= parser.read(each, source)
    return replace(given, read=read)


@contextlib.contextmanager
def _importing(device: str) -> Iterator[None]:
    """Prepare for the import of SGLang, and restore the event loop policy that it may replace."""
    if resolved(device) == "cpu":
        sglang_cpu.activate()
    policy = asyncio.get_event_loop_policy()
    try:
        yield
    finally:
        asyncio.set_event_loop_policy(policy)


def server_arguments(device: str, managed: Mapping[str, str]) -> ArgumentList:
    """Return the arguments of SGLang's engine for text and vectors, on a device of the settings."""

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        with _importing(device):
            module: Any = importlib.import_module("sglang.srt.server_args")
        module.ServerArgs.add_cli_args(parser)
        return {}

    return ArgumentList(engine="SGLang", managed=managed, add_to=add_to)


def diffusion_arguments(device: str) -> ArgumentList:
    """Return the arguments of SGLang's engine for images and videos."""

    def add_to(parser: argparse.ArgumentParser) -> Mapping[str, str]:
        with _importing(device):
            module: Any = importlib.import_module(
                "sglang.multimodal_gen.runtime.server_args.server_args"
            )
        module.ServerArgs.add_cli_args(parser)
        fields = {f.name for f in dataclasses.fields(module.ServerArgs)}
        actions = parser._actions  # noqa: SLF001 - argparse has no other list
        names = {action.dest for action in actions}
        # `DiffGenerator.from_pretrained` takes no others.
        return dict.fromkeys(names - fields, "SGLang takes it on its own command line only")

    return ArgumentList(
        engine="SGLang's diffusion engine",
        managed=DIFFUSION,
        add_to=add_to,
        only_in_file=_ONLY_IN_FILE,
    )


class _Parser(argparse.ArgumentParser):
    """An engine's parser that has no defaults, and raises instead of exiting."""

    def __init__(self, known: ArgumentList) -> None:
        super().__init__(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        self._known = known
        self._options: dict[str, argparse.Action] = {}
        self._managed: Mapping[str, str] = {}
        self._source = ""
        self._texts: dict[str, list[str]] = {}

    def ready(self, managed: Mapping[str, str]) -> None:
        """Forget the defaults, once all arguments are added; those in ``managed`` are refused."""
        self._managed = managed
        self._defaults.clear()
        for action in self._actions:
            action.default, action.required = argparse.SUPPRESS, False
            self._options |= {_plain_name(option): action for option in action.option_strings}
            self._options.setdefault(action.dest, action)

    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{self._known.engine}'s arguments {self._source}: {message}")

    def words(self, name: str, value: Any) -> list[str]:
        """Return the words of a command line that say what the file says."""
        self._source = "in engine_args of the file"
        action = self._action(name)
        flag = action.option_strings[0]
        if value is None:
            return []
        if isinstance(value, bool) and isinstance(action, argparse.BooleanOptionalAction):
            return [flag if value else _negated(action)]
        if isinstance(value, bool) and action.nargs == 0:
            return [flag] if value else []
        if action.nargs == 0:
            self.error(f"{name} is true or false, not {value!r}")
        if isinstance(value, list):
            return [flag, *(_text(each) for each in value)]
        return [f"{flag}={_text(value)}"]

    def read(self, words: Sequence[str], source: str) -> dict[str, ReadArgument]:
        """Read the words of one source."""
        self._source = {
            "file": "in engine_args of the file",
            "environment": "in MILLSTREAM_ENGINE_ARGS",
        }.get(source, "behind --")
        self._texts = {}
        words = [self._checked(word) for word in words]
        try:
            found, left = self.parse_known_args(words)
        except (ValueError, TypeError, AssertionError) as error:  # of an argument's own type
            self.error(str(error))
        if left:
            self.error(f"{left[0]!r} belongs to no argument")
        return {
            name: ReadArgument(value, self._shown(name, value), source)
            for name, value in vars(found).items()
        }

    def _checked(self, word: str) -> str:
        """Check a flag, and spell it with hyphens."""
        if not word.startswith("--") or len(word) == len("--"):
            return word
        name, equals, value = word.partition("=")
        self._action(name)
        return name.replace("_", "-") + equals + value

    def _action(self, name: str) -> argparse.Action:
        """Return the argument of a name, with or without hyphens."""
        found = self._options.get(_plain_name(name))
        if found is None:
            near = difflib.get_close_matches(_plain_name(name), self._options, 1)
            advice = f"; did you mean {_like(name, near[0])}?" if near else ""
            self.error(f"there is no {name}{advice}")
        if (ours := self._managed.get(found.dest)) is not None:
            use = f"use {ours}" if ours.startswith(("-", "MILL")) else ours
            self.error(f"{name} is not yours to set: {use}")
        return found

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        self._texts[action.dest] = list(arg_strings)
        return super()._get_values(action, arg_strings)

    def _shown(self, name: str, value: Any) -> Any:
        """Return an argument as JSON types: what the file would say."""
        if _SECRET.search(name):
            return "***"
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if same:
            return value
        texts = self._texts[name]
        return texts if len(texts) > 1 else texts[0]


def _plain_name(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def _like(name: str, found: str) -> str:
    """Write a name in the way that another is written."""
    return "--" + found.replace("_", "-") if name.startswith("-") else found


def _negated(action: argparse.Action) -> str:
    return next(option for option in action.option_strings if option.startswith("--no-"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
