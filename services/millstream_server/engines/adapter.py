"""What an engine's folder offers: its abilities, their settings, what makes the engine.

A new engine is a folder with a module `adapter`, whose `ADAPTER` gets a line in `engines.registry`.
That module imports settings only: a function that makes an engine imports the rest when it is
called, so a process loads the vendors of one engine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from millstream_server.control.engine import Follower, Role
from millstream_server.diffusion.diffuser import Diffuser
from millstream_server.diffusion.request import Kind
from millstream_server.embedding.embedder import Embedder
from millstream_server.encode.encoder import MediaEncoder
from millstream_server.engines.torch_on_cpu import NO_GPU, gpu_present, torch_build
from millstream_server.generation.generator import GeneratorEngine
from millstream_server.media.families.family import Family
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.errors import EngineFailedError
from millstream_server.runtime.lifecycle.python import lacking
from millstream_server.runtime.settings import EngineArguments, SettingsError, group, setting
from millstream_server.runtime.settings.arguments import refuse_arguments
from millstream_server.runtime.settings.declare import is_host_port

EngineT = TypeVar("EngineT")
Device = Literal["auto", "cuda", "cpu"]
ElementChoice = Literal["auto", "float32", "bfloat16", "float16"]


# ---- settings that engines share -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """Which part of the model a process runs; all have the same settings but the rank."""

    nodes: int = setting(1, help="processes that one model is spread over, each on its own machine")
    node_rank: int = setting(
        0,
        help="this process's number of them, from 0; 0 leads and serves the requests, the others "
        "serve health only",
    )
    leader_address: str = setting(
        "",
        help="HOST:PORT where the processes of one model meet: a free port of the one with rank 0",
    )

    @property
    def follows(self) -> bool:
        """Whether another process leads."""
        return self.node_rank > 0

    def check(self) -> None:
        """Check that these settings fit together.

        Raises:
            SettingsError: they contradict each other.
        """
        if self.nodes < 1:
            raise SettingsError(f"--nodes is {self.nodes}, not 1 or more")
        if self.node_rank >= self.nodes:
            raise SettingsError(
                f"--node-rank {self.node_rank}: with --nodes {self.nodes} ranks are 0 to "
                f"{self.nodes - 1}"
            )
        if self.nodes > 1 and not is_host_port(self.leader_address):
            raise SettingsError(
                f"--nodes {self.nodes} needs --leader-address HOST:PORT, the same for all of them; "
                f"it is {self.leader_address!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSettings:
    """Settings of every engine."""

    device: Device = setting("auto", help="auto, cuda or cpu")
    warm_up_timeout_s: float = setting(120.0, help="longest warm-up before the start fails")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedEngineSettings(DeviceSettings):
    """Settings of engines that take arguments of their own; 0 leaves a limit to the engine."""

    engine_args: EngineArguments = setting(
        EngineArguments(), help="the engine's own arguments: behind --, not as a flag"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorEngineSettings(ServedEngineSettings):
    """Settings of an engine for vectors and scores."""

    max_running_requests: int = setting(
        0, help="most inputs in a batch; 0: the engine decides, 64 on a CPU"
    )
    max_total_tokens: int = setting(0, help="KV cache size in tokens; 0: what fits")
    context_length: int = setting(0, help="most tokens of an input; 0: the model's")
    dimensions: tuple[str, ...] = setting(
        (),
        help="numbers to which requests may cut vectors, such as 64,128,256: for a model that was "
        "trained for that, and whose config.json doesn't say so",
    )
    rank_answers: tuple[str, ...] = setting(
        (),
        help="answers of a generative model that ranks, the good one first, such as yes,no: for "
        "one like Qwen3-Reranker whose files don't name them (1_LogitScore)",
    )
    topology: NodeSettings = group(NodeSettings)

    @property
    def cuts(self) -> list[int]:
        """Return `dimensions` as numbers.

        Raises:
            SettingsError: they aren't.
        """
        if wrong := [text for text in self.dimensions if not (text.isascii() and text.isdigit())]:
            raise SettingsError(f"--dimensions: {wrong[0]!r} is not a whole number")
        return [int(text) for text in self.dimensions]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEngineSettings(ServedEngineSettings):
    """Settings of an engine that generates text."""

    max_running_requests: int = setting(0, help="most requests at once; 0: the engine decides")
    max_total_tokens: int = setting(0, help="KV cache size in tokens; 0: what fits")
    context_length: int = setting(0, help="most tokens of prompt and completion; 0: the model's")
    bootstrap_host: str = setting(
        "127.0.0.1",
        help="this worker's address as its hand-off peers reach it: KV sockets bind there, and a "
        "prefill worker's goes into tickets",
    )
    bootstrap_port: int = setting(8998, help="prefill: port of the KV bootstrap")
    transfer_timeout_s: float = setting(
        30.0,
        help="longest transfer of a hand-off, from when prefill has computed and decode has room",
    )
    handoff_wait_s: float = setting(
        300.0, help="longest wait for the other leg of a hand-off: for its turn, prompt and room"
    )
    kv_events: bool = setting(
        default=True, help="tell what the prefix cache holds, for routing (WatchKvEvents)"
    )
    max_loras_per_batch: int = setting(
        0,
        help="LoRA adapters that requests in one batch may use; more can be loaded; 0: none, and "
        "no cost",
    )
    topology: NodeSettings = group(NodeSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class DllmSettings:
    """Settings of an engine that runs a diffusion language model."""

    dllm_algorithm: str = setting(
        "", help="how blocks are denoised, such as LowConfidence; required with SGLang"
    )
    dllm_config: Path | None = setting(
        None, help="YAML file for the algorithm, such as `threshold: 0.9` or `block_size: 4`"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffuserEngineSettings(ServedEngineSettings):
    """Settings of an engine for images and videos."""

    warm_up_timeout_s: float = setting(300.0, help="longest warm-up before the start fails")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSettings(ServedEngineSettings):
    """Settings of an encoder of images and videos."""

    dtype: ElementChoice = setting(
        "auto",
        help="type of the tower and its embeddings; auto: bfloat16 on a GPU, float32 on a CPU",
    )
    max_item_tokens: int = setting(
        16384, help="most tokens of an image or a video; a larger one is refused"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine is made with, besides the settings that only it reads."""

    common: Any
    """The ability's settings above: `TextEngineSettings` and so on."""
    role: Role = Role.AGGREGATED
    model_path: Path | None
    model_name: str
    """The model's name in requests."""
    metrics: bool = False
    """Whether this process has a metrics endpoint."""
    otlp_endpoint: str = ""
    """Collector of spans; empty: none."""
    dllm: DllmSettings | None = None
    """For text by diffusion."""
    kind: Kind | None = None
    """For images or videos: what a simulated engine makes; others make what the model does."""


# ---- what an engine can do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Generic[EngineT]):
    """One ability of an engine."""

    make: Callable[[Any, EngineContext], EngineT]
    """Makes the engine from ``settings`` and the rest; nothing is loaded yet.

    Raises SettingsError: the settings contradict each other.
    """
    settings: type[Any] | None = None
    """Settings that only this engine reads; their names differ from those of other engines."""
    read_arguments: Callable[[Any, Any], EngineArguments] | None = None
    """Checks ``settings`` and the ability's, and reads the arguments of the engine's own; raises
    SettingsError. None: it takes none."""
    follow: Callable[[Any, EngineContext], Follower] | None = None
    """Makes what runs a part of a model that another process serves; None: the engine runs in one
    process."""

    def checked(self, name: str, own: Any, common: Any) -> Any:
        """Return ``common`` with the engine's own arguments read.

        Raises:
            SettingsError: one is unknown, wrong, or managed by us, or the engine takes none.
        """
        nodes = getattr(common, "topology", NodeSettings())
        if self.follow is None and (nodes.nodes != 1 or nodes.node_rank):
            raise SettingsError(
                f"--nodes {nodes.nodes}, --node-rank {nodes.node_rank}: the {name} engine runs in "
                "one process"
            )
        if self.read_arguments is None:
            refuse_arguments(common.engine_args, name)
            return common
        return replace(common, engine_args=self.read_arguments(own, common))


@dataclass(frozen=True, slots=True)
class OwnEnvironment:
    """A Python environment that an engine's workers need, as its pins exclude other engines'."""

    package: str
    """What is installed there only."""
    folder: str
    """Its name, beside the environment of the suite."""
    command: str
    """What makes it, in a checkout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An engine: its name, what it can do, and what `millstream up` has to know of it."""

    name: str
    packages: tuple[str, ...] = ()
    """What its engines import, PyTorch among it; empty: nothing that may be missing."""
    generator: Offer[GeneratorEngine] | None = None
    text_diffuser: Offer[GeneratorEngine] | None = None
    encoder: Offer[MediaEncoder] | None = None
    encodes: Callable[[Family], bool] = lambda _: False
    """Whether `--engine auto` may choose its encoder for a family of models."""
    pixels: Callable[[Path], MediaEncoder] | None = None
    """Prepares images and videos for its generator, which has the vision tower itself; None: its
    generator takes embeddings only."""
    diffuser: Offer[Diffuser] | None = None
    embedder: Offer[Embedder] | None = None
    embeds: Callable[[Path], bool] = lambda _: True
    """Whether its embedder is right about a model, as far as the model's files say."""
    environment: OwnEnvironment | None = None
    """Where `millstream up` runs its workers; None: where it runs itself."""
    preload: str = ""
    """Names what the process imports from which `millstream up` forks its workers where there is no
    GPU (`runtime.forking.preload.find`); empty: each worker has an interpreter of its own."""
    suite_flags: Callable[[str, Path], Sequence[str]] = lambda _service, _model: ()
    """Flags that `millstream up` gives a worker of a service for a model, besides `--engine`, which
    encode workers don't get; "dllm": a diffusion worker that makes text. Raises SettingsError."""

    def expect(self, device: str) -> None:
        """Check that its engines can start here.

        Raises:
            SettingsError: a package isn't there, or a GPU that the worker was meant to have: else
                it would run on the CPU, healthy and slow.
        """
        if why := lacking(*self.packages):
            raise SettingsError(f"--engine {self.name}: {why}")
        if not self.packages or device == "cpu" or gpu_present():
            return
        _, cuda = torch_build() or ("", "")
        if device == "cuda" or cuda:
            why = "" if device == "cuda" else f"PyTorch here is built for CUDA {cuda}, and "
            raise SettingsError(f"--device {device}: {why}this process sees no GPU: {NO_GPU}")


def model_folder(path: Path | None, engine: str, what: str, marker: str) -> Path:
    """Return the directory of a model's files, which must have the file ``marker``.

    Raises:
        SettingsError: it is none, or its download isn't complete.
    """
    if path is None:
        raise SettingsError(f"--model-path is required with --engine {engine}: {what}")
    expect_weights(path)
    if not (path / marker).is_file():
        raise SettingsError(f"--model-path {path}: there is no {marker} in it")
    return path


def not_started(engine: str) -> EngineFailedError:
    """Make the error of a vendor's engine that raised while it started."""
    home = Path.home()
    if not os.access(home, os.W_OK | os.X_OK):
        return EngineFailedError(
            f"{engine} could not be started: HOME is {home}, where nothing can be written; "
            "compiled kernels are kept there."
        )
    return EngineFailedError(f"{engine} could not be started; the worker's log has the cause.")
