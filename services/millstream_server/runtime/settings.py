"""Typed settings from flags, else the environment, else defaults; read once at the start.

The only module that reads `os.environ`. A component declares its settings as a frozen dataclass
with `setting(...)` fields; `load` makes flags (`--step-s`) and variables (`MILLSTREAM_STEP_S`) of
them, and exits with an error that names a value that doesn't parse. A part with settings of its
own, such as an engine adapter, declares them in a dataclass beside its code. The component includes
them as a `group(...)`; their flags and variables are named like its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import os
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

T = TypeVar("T")
_PREFIX = "MILLSTREAM_"


class SettingsError(Exception):
    """A setting is missing, invalid or contradicts another; the text names it."""


def setting(default: Any = dataclasses.MISSING, *, help: str, secret: bool = False) -> Any:  # noqa: A002
    """Declare one setting.

    ``secret`` settings come from the environment only, since process lists show flags, and are
    masked when the configuration is printed.
    """
    return dataclasses.field(default=default, metadata={"help": help, "secret": secret})


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


def load(
    cls: type[T],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    prog: str,
    description: str,
) -> T:
    """Read settings; a wrong one ends the process with exit code 2 and its name."""
    env = os.environ if env is None else env
    parser = _parser(cls, prog, description)
    flags = vars(parser.parse_args(argv))
    try:
        settings = _build(cls, flags, env)
    except SettingsError as error:
        parser.error(str(error))
    if flags["print_config"]:
        sys.stdout.write(json.dumps(describe(settings), indent=2) + "\n")
        raise SystemExit(0)
    return settings


def read_first(
    cls: type[T], argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> T:
    """Read the few settings that decide which others there are; those are not looked at.

    Where one is wrong the defaults are returned: `load`, which comes next, says what is wrong.
    """
    env = os.environ if env is None else env
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for f in declared(cls):
        parser.add_argument("--" + f.name.replace("_", "-"), default=None)
    try:
        flags, _ = parser.parse_known_args(argv)
        return _build(cls, vars(flags), env)
    except (SettingsError, argparse.ArgumentError):
        return cls()


def describe(settings: Any) -> dict[str, Any]:
    """Return the effective settings as JSON types, secrets masked."""
    told: dict[str, Any] = {}
    for f in dataclasses.fields(settings):
        value = getattr(settings, f.name)
        if "group" in f.metadata:
            told |= describe(value)
        else:
            told[f.name] = "***" if f.metadata["secret"] and value else _plain(value)
    return told


def _parser(cls: type[Any], prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"Every flag can be set as {_PREFIX}<NAME> in the environment; a flag wins.",
        allow_abbrev=False,
    )
    for f in declared(cls):
        text = f.metadata["help"]
        if f.default is dataclasses.MISSING:
            text += " (required)"
        elif f.default not in (None, "", ()):
            text += f" (default: {_plain(f.default)})"
        if f.metadata["secret"]:
            parser.epilog = f"{parser.epilog}\nFrom the environment only: {_variable(f)}: {text}"
            continue
        parser.add_argument(
            "--" + f.name.replace("_", "-"),
            default=None,
            metavar=f.name.rsplit("_", 1)[-1].upper(),
            help=text.replace("%", "%%"),
        )
    parser.add_argument(
        "--print-config", action="store_true", help="print the effective settings and stop"
    )
    return parser


def _variable(f: dataclasses.Field[Any]) -> str:
    return _PREFIX + str(f.name).upper()


def _build(cls: type[T], flags: Mapping[str, Any], env: Mapping[str, str]) -> T:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "group" in f.metadata:
            values[f.name] = _build(f.metadata["group"], flags, env)
            continue
        text = flags.get(f.name)
        source = "--" + f.name.replace("_", "-")
        if text is None and _variable(f) in env:
            text, source = env[_variable(f)], _variable(f)
        if text is not None:
            values[f.name] = _parse(text, hints[f.name], source)
        elif f.default is dataclasses.MISSING:
            message = f"{source} is required (or {_variable(f)} in the environment): " + str(
                f.metadata["help"]
            )
            raise SettingsError(message)
    return cls(**values)


def _parse(text: str, kind: Any, source: str) -> Any:
    if typing.get_origin(kind) is typing.Literal:
        if text not in typing.get_args(kind):
            raise SettingsError(
                f"{source}: {text!r} is not one of " + ", ".join(typing.get_args(kind))
            )
        return text
    options = [k for k in typing.get_args(kind) if k is not NoneType]
    if typing.get_origin(kind) is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if options:
        return None if text == "" else _parse(text, options[0], source)
    parse = _SCALARS.get(kind)
    if parse is None and issubclass(kind, enum.Enum):
        parse = kind
    if parse is None:
        message = f"settings of type {kind} are not supported"
        raise TypeError(message)
    try:
        return parse(text)
    except ValueError:
        raise SettingsError(f"{source}: {text!r} is not {_expected(kind)}") from None


def _bool(text: str) -> bool:
    try:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}[
            text.lower()
        ]
    except KeyError:
        raise ValueError(text) from None


def _span(text: str) -> float:
    """Parse a float: all of ours are times or shares, so finite and not negative."""
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(text)
    return value


def _count(text: str) -> int:
    """Parse a whole number: all of ours are counts, ports and sizes, so not negative."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


_SCALARS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: _count,
    float: _span,
    bool: _bool,
    Path: Path,
}


def _expected(kind: Any) -> str:
    if kind is bool:
        return "true or false"
    if kind in _SCALARS:
        return {int: "a whole number, 0 or more", float: "a number, 0 or more"}.get(
            kind, str(kind.__name__)
        )
    return "one of " + ", ".join(str(member.value) for member in kind)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
