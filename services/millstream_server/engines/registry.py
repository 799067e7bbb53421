"""The engines: by ability, which there are, which settings they have, and how one is made.

A new engine is its folder and a line in `ADAPTERS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, cast

from millstream_server.control.engine import Follower, Role
from millstream_server.engines.adapter import Adapter, EngineContext, Offer
from millstream_server.engines.diffusers import adapter as diffusers
from millstream_server.engines.sglang import adapter as sglang
from millstream_server.engines.simulated import adapter as simulated
from millstream_server.engines.transformers import adapter as transformers
from millstream_server.engines.vllm import adapter as vllm
from millstream_server.model_files.state import expect_weights
from millstream_server.runtime.settings import SettingsError, group

EngineT = TypeVar("EngineT")
SettingsT = TypeVar("SettingsT")
AUTO = "auto"

ADAPTERS = (
    sglang.ADAPTER,
    vllm.ADAPTER,
    transformers.ADAPTER,
    diffusers.ADAPTER,
    simulated.ADAPTER,
)
"""In the order in which `--engine auto` asks them."""
_BY_NAME = {each.name: each for each in ADAPTERS}


class Engines(Generic[EngineT]):
    """The engines that have one ability, by name.

    A service's settings (a `worker.host_settings.ModelSettings`) have `engine`, the name; `common`,
    what several engines read (`engines.adapter`); and `own`, a group of `own_settings`.

    The methods raise SettingsError: there is no such engine, it doesn't have the ability or takes
    no such arguments, or settings contradict each other.
    """

    def __init__(self, able: str, offer: Callable[[Adapter], Offer[EngineT] | None]) -> None:
        """``able`` follows "engines that" in errors; ``offer`` returns what an adapter offers."""
        self._able = able
        self._offers = {a.name: found for a in ADAPTERS if (found := offer(a)) is not None}
        fields = [
            (name, each.settings, group(each.settings))
            for name, each in self._offers.items()
            if each.settings is not None
        ]
        self.own_settings: type[Any] = dataclasses.make_dataclass(
            "OwnSettings", fields, frozen=True, slots=True, kw_only=True
        )
        """A group: for each engine, by its name, the settings that only it reads."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._offers)

    def offer(self, name: str) -> Offer[EngineT]:
        """Return what an engine offers."""
        if (found := self._offers.get(name)) is None:
            why = f"it doesn't {self._able}" if name in _BY_NAME else "there is no such engine"
            raise SettingsError(
                f"--engine {name}: {why}; engines that {self._able}: {', '.join(self.names)}"
            )
        return found

    def checked(self, settings: SettingsT) -> SettingsT:
        """Return a service's settings with the engine's own arguments read."""
        given: Any = settings
        offer, own = self._chosen(given)
        common = offer.checked(given.engine, own, given.common)
        return cast("SettingsT", dataclasses.replace(given, common=common))

    def make(self, settings: Any, role: Role, **further: Any) -> EngineT:
        """Make a service's engine; nothing is loaded yet. ``further``: more of `EngineContext`."""
        offer, own = self._chosen(settings)
        _BY_NAME[settings.engine].expect(settings.common.device)
        return offer.make(own, _context(settings, role, further))

    def follower(self, settings: Any, role: Role, **further: Any) -> Follower | None:
        """Make what runs a part of a model that another process serves; None: this one does."""
        offer, own = self._chosen(settings)
        if offer.follow is None or not settings.common.topology.follows:
            return None
        _BY_NAME[settings.engine].expect(settings.common.device)
        return offer.follow(own, _context(settings, role, further))

    def _chosen(self, settings: Any) -> tuple[Offer[EngineT], Any]:
        """Return the offer that the settings name, and the settings that only it reads."""
        return self.offer(settings.engine), getattr(settings.own, settings.engine, None)


def _context(settings: Any, role: Role, further: Mapping[str, Any]) -> EngineContext:
    return EngineContext(
        common=settings.common,
        role=role,
        model_path=settings.model_path,
        model_name=settings.served_name,
        metrics=bool(settings.metrics_listen),
        otlp_endpoint=settings.otlp_endpoint,
        **further,
    )


GENERATORS = Engines("generate text", lambda adapter: adapter.generator)
TEXT_DIFFUSERS = Engines("make text by diffusion", lambda adapter: adapter.text_diffuser)
ENCODERS = Engines("encode images and videos", lambda adapter: adapter.encoder)
DIFFUSERS = Engines("make images and videos", lambda adapter: adapter.diffuser)
EMBEDDERS = Engines("make vectors and scores", lambda adapter: adapter.embedder)

# Types of the settings `engine`: a wrong name is refused as a wrong choice of any setting is.
if TYPE_CHECKING:
    GeneratorName: TypeAlias = str
    TextDiffuserName: TypeAlias = str
    EncoderName: TypeAlias = str
    DiffuserName: TypeAlias = str
    EmbedderName: TypeAlias = str
else:
    GeneratorName = Literal[GENERATORS.names]
    TextDiffuserName = Literal[TEXT_DIFFUSERS.names]
    EncoderName = Literal[AUTO, *ENCODERS.names]
    DiffuserName = Literal[DIFFUSERS.names]
    EmbedderName = Literal[EMBEDDERS.names]


def adapter(name: str) -> Adapter:
    """Return an engine's adapter, whatever it can do.

    Raises:
        SettingsError: there is no such engine.
    """
    if name not in _BY_NAME:
        raise SettingsError(
            f"--engine {name}: there is no such engine; there are {', '.join(_BY_NAME)}"
        )
    return _BY_NAME[name]


def embedder_for(model_path: Path, preferred: str) -> str:
    """Return an engine that embeds or ranks with a model: ``preferred`` if it can.

    Raises:
        SettingsError: there is no such engine.
    """
    return preferred if adapter(preferred).embeds(model_path) else transformers.ADAPTER.name


def encoder_for(model_path: Path | None) -> str:
    """Return the name that `auto` means: the first engine that encodes for the model's family.

    Raises:
        SettingsError: there is no model that reads images, or its files aren't complete.
    """
    if model_path is None:
        raise SettingsError("--model-path is required, except with --engine simulated")
    expect_weights(model_path)
    family = transformers.family_of(model_path)
    return next(each.name for each in ADAPTERS if each.encoder and each.encodes(family))
