"""How a component declares its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "MILLSTREAM_"
"""Of variables in the environment."""


class SettingsError(Exception):
    """A setting is missing, invalid or contradicts another; the text names it."""


def setting(
    default: Any = dataclasses.MISSING,
    *,
    help: str,  # noqa: A002
    secret: bool = False,
    pairs: bool = False,
) -> Any:
    """Declare one setting.

    ``secret`` settings come from the environment only, since process lists show flags and files are
    copied, and are masked when the configuration is printed. A setting with ``pairs`` is a tuple of
    NAME=VALUE; in the file it may be a mapping.
    """
    metadata = {"help": help, "secret": secret, "pairs": pairs}
    return dataclasses.field(default=default, metadata=metadata)


def group(cls: type[Any]) -> Any:
    """Include the settings of the dataclass ``cls``; all of them need defaults."""
    return dataclasses.field(default_factory=cls, metadata={"group": cls})


def declared(cls: type[Any]) -> Iterator[dataclasses.Field[Any]]:
    """Yield every setting of ``cls``, groups expanded in place."""
    for f in dataclasses.fields(cls):
        if "group" in f.metadata:
            yield from declared(f.metadata["group"])
        else:
            yield f


def removed(cls: type[Any]) -> Mapping[str, str]:
    """Return the settings that ``cls`` or a group of it once had: what to write instead, by name.

    A class has them in `REMOVED`: a variable that is ignored would change a service unnoticed.
    """
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        found |= vars(each).get("REMOVED", {})
    for f in dataclasses.fields(cls):
        if "group" in f.metadata:
            found |= removed(f.metadata["group"])
    known = {f.name for f in declared(cls)}
    return {name: instead for name, instead in found.items() if name not in known}


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()
