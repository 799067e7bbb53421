"""The settings file: YAML, each key a setting's name, sections allowed, all of it checked."""

from __future__ import annotations

import difflib
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from millstream_server.runtime.settings.declare import SettingsError, variable

_MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FileValue:
    """A setting as the file has it."""

    value: Any
    """Of YAML's types."""
    source: str
    """File, line and key, for errors."""
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The settings that a file may have."""

    names: Collection[str]
    secrets: Collection[str]
    mappings: Collection[str]
    """Those of `names` whose values may be mappings, so that they are no sections."""
    others: bool = False
    """Whether there may be others, which are not looked at."""


def read_file(path: Path, known: KnownKeys) -> dict[str, FileValue]:
    """Read a settings file: names of settings to values.

    Raises:
        SettingsError: the file can't be read or isn't YAML, or a key is unknown, secret or there
            twice.
    """
    import yaml  # noqa: PLC0415 - a process without a settings file needs none

    text = _text(path)
    reader = _Reader(path, known)
    try:
        loader = _loader()(text)
        try:
            node = loader.get_single_node()
            if node is not None:
                reader.section(loader, node, "")
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise SettingsError(f"--config {path}: too many levels of sections or lists") from error
    return reader.found


def _text(path: Path) -> str:
    """Return the file's text.

    A pipe is refused: the file is read twice, and the second time a pipe has nothing more.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            reason = "it is not a regular file"
        elif found.st_size > _MAX_BYTES:
            reason = f"it has {found.st_size} bytes, and {_MAX_BYTES} are the most"
        else:
            return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise SettingsError(f"--config {path}: the file can't be read: {reason}") from error
    raise SettingsError(f"--config {path}: the file can't be read: {reason}")


@dataclass(slots=True)
class _Reader:
    path: Path
    known: KnownKeys
    found: dict[str, FileValue] = field(default_factory=dict)

    def section(self, loader: Any, node: Any, prefix: str) -> None:
        """Read a section whose settings' names begin with ``prefix``."""
        if node.tag == "tag:yaml.org,2002:null":
            return  # all of its lines are comments
        if node.id != "mapping":
            where = f"section {prefix[:-1]}" if prefix else "a settings file"
            self._refuse(node, f"{where} is a mapping of settings: NAME: VALUE")
        keys = set()
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            if not isinstance(key, str):
                self._refuse(key_node, f"{key!r} is not a setting's name")
            if key in keys:
                self._refuse(key_node, f"{prefix}{key} is there twice")
            keys.add(key)
            self._entry(loader, prefix + key, key_node, value_node)

    def _entry(self, loader: Any, name: str, key_node: Any, value_node: Any) -> None:
        known = self.known
        is_section = any(each.startswith(f"{name}_") for each in (*known.names, *known.secrets))
        if name in known.secrets:
            advice = f"set {variable(name)} in the environment"
            self._refuse(key_node, f"{name} is a secret, which a file may not have: {advice}")
        elif is_section and (value_node.id == "mapping" or name not in known.names):
            self.section(loader, value_node, f"{name}_")
        elif name not in known.names:
            if known.others:
                return
            near = difflib.get_close_matches(name.replace("-", "_"), known.names, 1)
            advice = f"; did you mean {near[0]}?" if near else "; --help lists them"
            self._refuse(key_node, f"there is no setting {name}{advice}")
        elif name in self.found:
            line = self.found[name].line
            self._refuse(key_node, f"{name} is there twice, first in line {line}")
        else:
            value = loader.construct_object(value_node, deep=True)
            if isinstance(value, dict) and name not in known.mappings:
                self._refuse(key_node, f"{name} is a setting, not a section")
            self.found[name] = FileValue(value, self._at(key_node, name), _line(key_node))

    def _at(self, node: Any, what: str) -> str:
        return f"{self.path}, line {_line(node)}: {what}"

    def _refuse(self, node: Any, why: str) -> None:
        raise SettingsError(self._at(node, why))


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


@cache
def _loader() -> type[Any]:
    """Make PyYAML's safe loader with the types of YAML 1.2, and no key twice.

    PyYAML's own are of YAML 1.1, where `no` is false, `1:30` is 90 and `1e+09` is text; Helm writes
    the last for large whole numbers. Aliases are refused, since a few lines of them can stand for
    any amount of memory, and tags, since no setting needs one.
    """
    import yaml  # noqa: PLC0415

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML is untyped
        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

        def compose_node(self, parent: Any, index: Any) -> Any:
            event = self.peek_event()
            if isinstance(event, yaml.AliasEvent):
                why = f"*{event.anchor}: aliases can't be used here; write the value again"
            elif event.tag is not None:
                why = f"the tag {event.tag} can't be used here; text is put in quotes"
            else:
                return super().compose_node(parent, index)
            raise yaml.composer.ComposerError(None, None, why, event.start_mark)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002
            seen: set[Any] = set()
            for key_node, _ in node.value:
                key = self.construct_object(key_node)
                if not isinstance(key, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key!r} is no name", key_node.start_mark
                    )
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key} is there twice", key_node.start_mark
                    )
                seen.add(key)
            return super().construct_mapping(node, deep)

    for name, pattern, first in _TYPES:
        Loader.add_implicit_resolver(
            f"tag:yaml.org,2002:{name}", re.compile(f"(?:{pattern})$"), list(first)
        )
    return Loader


_TYPES = (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", "~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", "[-+]?(?:0|[1-9][0-9]{0,30})", "-+0123456789"),
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", "-+0123456789."),
)
