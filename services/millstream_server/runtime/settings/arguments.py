"""An engine's own arguments, which Millstream passes on after a check by the engine's adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ReadArgument:
    """One argument in effect."""

    value: Any
    """As the engine's own parser returns it."""
    shown: Any
    """The same as JSON types: what a file would say."""
    source: str
    """"file", "environment" or "flag"."""


@dataclass(frozen=True, slots=True)
class EngineArguments:
    """Arguments as they were given, and as the engine's adapter has read them.

    They weigh like other settings, argument by argument: flags, then environment, then file.
    """

    file: Mapping[str, Any] = field(default_factory=dict)
    """Names to values, of the settings file."""
    environment: tuple[str, ...] = ()
    """Words of a command line."""
    flags: tuple[str, ...] = ()
    """Words behind `--`."""
    read: Mapping[str, ReadArgument] = field(default_factory=dict)
    """The result of the adapter; empty before."""

    @property
    def given(self) -> bool:
        """Whether there are any."""
        return bool(self.file or self.environment or self.flags)

    @property
    def values(self) -> dict[str, Any]:
        """What the engine gets."""
        return {name: argument.value for name, argument in self.read.items()}

    @property
    def shown(self) -> dict[str, Any]:
        """What is in effect, as JSON types."""
        return {name: argument.shown for name, argument in self.read.items()}
