"""How a component declares its settings, and how a value is read.

A value is the text of a flag or a variable, or of the settings file with a type of YAML's.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

PREFIX = "MILLSTREAM_"
"""Of variables in the environment."""
_MAX_PORT = 65535
_DIGITS = 5
_HOST = re.compile(r"[^\s/]+")


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


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """Return the environment variable of a setting."""
    return PREFIX + name.upper()


# ---- values


def from_text(text: str, kind: Any, source: str) -> Any:
    """Read a flag's or a variable's text; ``source`` is named in errors.

    Raises:
        SettingsError: it is no value of this type.
    """
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    optional = option(kind)
    if optional is not None:
        return None if text == "" else from_text(text, optional, source)
    chosen = choices(kind)
    if chosen is not None:
        return _choose(text, kind, chosen, source)
    scalar = SCALARS.get(kind)
    if scalar is None:
        message = f"settings of type {kind} are not supported"
        raise TypeError(message)
    try:
        return scalar.parse(text)
    except ValueError:
        raise SettingsError(f"{source}: {text!r} is not {scalar.told}") from None


def from_file(value: Any, kind: Any, source: str, *, pairs: bool = False) -> Any:
    """Read a value of the settings file, whose YAML type must be the setting's.

    Raises:
        SettingsError: it is no value of this type.
    """
    if typing.get_origin(kind) is tuple:
        return _entries(value, source, pairs=pairs)
    optional = option(kind)
    if optional is not None:
        return None if value in (None, "") else from_file(value, optional, source)
    chosen = choices(kind)
    if chosen is not None and isinstance(value, str):
        return _choose(value, kind, chosen, source)
    found = _number(value, kind) if kind in (int, float) else _plain_value(value, kind)
    if found is not None:
        return found
    wanted = "one of " + ", ".join(chosen) if chosen else SCALARS[kind].told
    quotes = ""
    if (kind in (str, Path) or chosen) and not isinstance(value, dict | list | NoneType):
        quotes = "; put it in quotes"
    raise SettingsError(f"{source}: {_told(value)} is not {wanted}{quotes}")


def option(kind: Any) -> Any:
    """Return X of the type `X | None`; None for other types."""
    found = [k for k in typing.get_args(kind) if k is not NoneType]
    return found[0] if NoneType in typing.get_args(kind) else None


def choices(kind: Any) -> list[str] | None:
    """Return the values of an enum or a Literal; None for other types."""
    if typing.get_origin(kind) is typing.Literal:
        return list(typing.get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [member.value for member in kind]
    return None


def _choose(text: str, kind: Any, chosen: list[str], source: str) -> Any:
    if text not in chosen:
        raise SettingsError(f"{source}: {text!r} is not one of " + ", ".join(chosen))
    return kind(text) if isinstance(kind, type) else text


def _entries(value: Any, source: str, *, pairs: bool) -> tuple[str, ...]:
    if pairs and isinstance(value, dict):
        for name, each in value.items():
            if "=" in name or not isinstance(each, str | NoneType):
                raise SettingsError(
                    f"{source}: {name}: {_told(each)} is not a name without '=', and a text"
                )
        value = [f"{name}={each}" if each else name for name, each in value.items()]
    if not (isinstance(value, list) and all(isinstance(each, str) for each in value)):
        wanted = "a list of texts" + (", or a mapping of names to texts" if pairs else "")
        raise SettingsError(f"{source}: {_told(value)} is not {wanted}")
    return tuple(value)


def _number(value: Any, kind: Any) -> Any:
    """Return a number of ours; an integral float is a whole number, as Helm writes large ones so.

    None: it isn't one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not (math.isfinite(value) and value >= 0) or (kind is int and value != int(value)):
        return None
    return kind(value)


def _plain_value(value: Any, kind: Any) -> Any:
    wanted = str if kind is Path else kind
    return kind(value) if type(value) is wanted else None


def _told(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list):
        return "a list" if all(isinstance(each, str) for each in value) else f"{value!r}"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _bool(text: str) -> bool:
    if text.lower() not in ("true", "1", "yes", "false", "0", "no"):
        raise ValueError(text)
    return text.lower() in ("true", "1", "yes")


def _amount(kind: type[float], text: str) -> float:
    """Parse a number: all of ours are times, shares, counts, ports or sizes."""
    value = kind(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


class Scalar(NamedTuple):
    """A type that a setting may have."""

    parse: Callable[[str], Any]
    """Raises ValueError."""
    told: str
    """What is expected, in errors."""
    in_json: str
    """Its type in JSON Schema."""


SCALARS: dict[Any, Scalar] = {
    str: Scalar(str, "text", "string"),
    int: Scalar(partial(_amount, int), "a whole number, 0 or more", "integer"),
    float: Scalar(partial(_amount, float), "a number, 0 or more", "number"),
    bool: Scalar(_bool, "true or false", "boolean"),
    Path: Scalar(Path, "text, a path", "string"),
}


# ---- addresses


def is_port(text: str) -> bool:
    """Return whether ``text`` is a port's number."""
    return (
        text.isascii() and text.isdigit() and len(text) <= _DIGITS and 1 <= int(text) <= _MAX_PORT
    )


def is_host_port(text: str) -> bool:
    """Return whether ``text`` is HOST:PORT, where an IPv6 address has brackets.

    Whether there is such a host isn't looked at.
    """
    host, _, port = text.rpartition(":")
    in_brackets = host.startswith("[") and host.endswith("]")
    return bool(_HOST.fullmatch(host)) and (":" not in host or in_brackets) and is_port(port)
