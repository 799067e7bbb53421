"""Reads settings: a flag wins over the environment, that over the file, that over the default.

The only module that reads `os.environ`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
import shlex
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from millstream_server.runtime.settings.arguments import EngineArguments
from millstream_server.runtime.settings.declare import (
    PREFIX,
    SettingsError,
    declared,
    flag,
    from_file,
    from_text,
    variable,
)
from millstream_server.runtime.settings.file import FileValue, KnownKeys, read_file
from millstream_server.runtime.settings.show import plain, print_config, schema

T = TypeVar("T")
_CONFIG = "config"
_VARIABLES = Path(__file__).with_name("variables.txt")
"""All variables that our programs read, without `PREFIX`; `deploy/helm/settings.py` writes it."""
_SERVICE_LINK = re.compile(r"(^|_)(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_\w+)?)$")
"""The end of variables that Kubernetes makes of a Service's name, such as millstream-processor."""
_ORDER = """\
Where a setting comes from: its flag; else the variable MILLSTREAM_<NAME>; else the YAML file that
--config or MILLSTREAM_CONFIG names, whose keys are the settings' names (drain_s: 60), also in
sections (tls: {cert_file: ...}); else the default."""
_ENGINE_ORDER = """
The engine's own arguments follow --, after all other flags: ... -- --tp-size 8. They can be in
MILLSTREAM_ENGINE_ARGS too (the same text), and in the file (engine_args: {tp_size: 8}); each comes
from the first of these three that has it."""


@dataclass(slots=True)
class _Sources:
    """What was given, by kind of source."""

    flags: Mapping[str, Any]
    env: Mapping[str, str]
    file: Mapping[str, FileValue] = field(default_factory=dict)
    behind: tuple[str, ...] = ()
    """Words behind `--`."""
    origins: dict[str, str] = field(default_factory=dict)
    """Where each setting was found."""


def load(
    cls: type[T],
    argv: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    prog: str,
    description: str,
) -> T:
    """Read settings; a wrong one ends the process with exit code 2 and its name.

    Where ``cls`` has a method `checked`, its result is returned instead: it reads the engine's own
    arguments, or raises SettingsError.
    """
    env = os.environ if env is None else env
    parser = _parser(cls, prog, description)
    words, behind = _split(argv)
    flags, unknown = parser.parse_known_args(words)
    if flags.print_settings_schema:
        sys.stdout.write(json.dumps(schema(cls), indent=2) + "\n")
        raise SystemExit(0)
    try:
        _refuse_unknown(cls, unknown, behind, prog)
        path = flags.config or env.get(variable(_CONFIG))
        file = read_file(Path(path), known_keys(cls)) if path else {}
        sources = _Sources(vars(flags), env, file, tuple(behind or ()))
        settings = _build(cls, sources)
        if hasattr(settings, "checked"):
            settings = settings.checked()
    except SettingsError as error:
        parser.error(str(error))
    if flags.print_config:
        sys.stdout.write(print_config(settings, sources.origins))
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
    for name in (_CONFIG, *(f.name for f in declared(cls))):
        parser.add_argument(flag(name), default=None)
    try:
        flags, _ = parser.parse_known_args(_split(argv)[0])
        path = flags.config or env.get(variable(_CONFIG))
        file = read_file(Path(path), replace(known_keys(cls), others=True)) if path else {}
        return _build(cls, _Sources(vars(flags), env, file))
    except (SettingsError, argparse.ArgumentError):
        return cls()


def unread_variables(env: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables with our prefix that no program of ours reads, such as misspelt ones.

    Each is followed by the name that was probably meant, if there is one.
    """
    known = _VARIABLES.read_text(encoding="utf-8").split()
    unread = []
    for given in sorted(os.environ if env is None else env):
        name = given.removeprefix(PREFIX)
        if name == given or name in known or _SERVICE_LINK.search(name):
            continue
        near = difflib.get_close_matches(name, known, 1)
        unread.append(f"{given} (did you mean {PREFIX}{near[0]}?)" if near else given)
    return unread


def known_keys(cls: type[Any]) -> KnownKeys:
    """Return the keys that a settings file for ``cls`` may have."""
    settings = list(declared(cls))
    return KnownKeys(
        names=[f.name for f in settings if not f.metadata["secret"]],
        secrets=[f.name for f in settings if f.metadata["secret"]],
        mappings=[f.name for f in settings if f.metadata["pairs"] or _is_arguments(f)],
    )


def _is_arguments(f: dataclasses.Field[Any]) -> bool:
    return isinstance(f.default, EngineArguments)


def _split(argv: Sequence[str] | None) -> tuple[list[str], list[str] | None]:
    """Divide a command line at the first `--`; None: there is none."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "--" not in words:
        return words, None
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _refuse_unknown(
    cls: type[Any], unknown: list[str], behind: list[str] | None, prog: str
) -> None:
    takes_arguments = any(_is_arguments(f) for f in declared(cls))
    if unknown:
        advice = " (the engine's own arguments go behind --)" if takes_arguments else ""
        raise SettingsError(f"unrecognized arguments: {' '.join(unknown)}{advice}")
    if behind is not None and not takes_arguments:
        raise SettingsError(
            f"{prog} runs no engine that takes arguments of its own: nothing may follow --"
        )


def _parser(cls: type[Any], prog: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_ORDER,
        allow_abbrev=False,
    )
    secrets = ""
    for f in declared(cls):
        text = f.metadata["help"]
        if f.default is dataclasses.MISSING:
            text += " (required)"
        elif f.default not in (None, "", ()):
            text += f" (default: {plain(f.default)})"
        if _is_arguments(f):
            parser.usage = "%(prog)s [FLAGS] [-- ENGINE FLAGS]"
            parser.epilog = f"{_ORDER}\n{_ENGINE_ORDER}"
        elif f.metadata["secret"]:
            secrets += f"\nFrom the environment only: {variable(f.name)}: {text}"
        else:
            metavar = f.name.rsplit("_", 1)[-1].upper()
            described = text.replace("%", "%%")
            action: Any = _Joined if f.metadata["pairs"] else "store"
            parser.add_argument(
                flag(f.name), default=None, action=action, metavar=metavar, help=described
            )
    parser.epilog = f"{parser.epilog}\n{secrets}"
    parser.add_argument(
        flag(_CONFIG), metavar="FILE", help="YAML file of settings; or MILLSTREAM_CONFIG"
    )
    for name, text in (
        ("print-config", "print the settings in effect as such a file, and stop"),
        ("print-settings-schema", "print the JSON Schema of such a file, and stop"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    return parser


class _Joined(argparse.Action):
    """A list that may be given in several flags."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        before = getattr(namespace, self.dest)
        setattr(namespace, self.dest, f"{before},{values}" if before else values)


def _build(cls: type[T], sources: _Sources) -> T:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for f in dataclasses.fields(cls):  # type: ignore[arg-type]
        if "group" in f.metadata:
            values[f.name] = _build(f.metadata["group"], sources)
        elif _is_arguments(f):
            values[f.name] = _arguments(f.name, sources)
        else:
            found = _find(f, hints[f.name], sources)
            if found is not dataclasses.MISSING:
                values[f.name] = found
    return cls(**values)


def _find(f: dataclasses.Field[Any], kind: Any, sources: _Sources) -> Any:
    """Return a setting's value; MISSING: it has its default."""
    texts = [
        ("flag", flag(f.name), sources.flags.get(f.name)),
        ("environment", variable(f.name), sources.env.get(variable(f.name))),
    ]
    for origin, source, text in texts:
        if text is not None:
            sources.origins[f.name] = origin
            return from_text(text, kind, source)
    if (found := sources.file.get(f.name)) is not None:
        sources.origins[f.name] = f"file, line {found.line}"
        return from_file(found.value, kind, found.source, pairs=f.metadata["pairs"])
    if f.default is dataclasses.MISSING:
        raise SettingsError(
            f"{flag(f.name)} is required (or {variable(f.name)} in the environment, or {f.name} in "
            f"the file): {f.metadata['help']}"
        )
    return dataclasses.MISSING


def _arguments(name: str, sources: _Sources) -> EngineArguments:
    found = sources.file.get(name)
    mapping = found.value if found else None
    if found and mapping is not None and not isinstance(mapping, dict):
        raise SettingsError(f"{found.source}: it must be a mapping, such as {{tp_size: 8}}")
    try:
        words = shlex.split(sources.env.get(variable(name), ""))
    except ValueError as error:
        raise SettingsError(f"{variable(name)}: {error}") from error
    return EngineArguments(mapping or {}, tuple(words), sources.behind)
