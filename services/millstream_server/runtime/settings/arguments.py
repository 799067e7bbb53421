"""An engine's own arguments: passed on after a check by its own parser."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from millstream_server.runtime.settings.declare import SettingsError

_SOURCES = {
    "file": "in engine_args of the file",
    "environment": "in MILLSTREAM_ENGINE_ARGS",
    "flag": "behind --",
}
_SECRET = re.compile(r"(^|_)(api_key|password|secret|watermark_key\w*)$")


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
        return bool(self.file or self.environment or self.flags)

    @property
    def values(self) -> dict[str, Any]:
        return {name: argument.value for name, argument in self.read.items()}

    @property
    def shown(self) -> dict[str, Any]:
        """What is in effect, as JSON types."""
        return {name: argument.shown for name, argument in self.read.items()}


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


def refuse_arguments(given: EngineArguments, engine: str) -> None:
    """Refuse arguments for an engine that takes none.

    Raises:
        SettingsError: there are some.
    """
    if given.given:
        there = {"flag": given.flags, "environment": given.environment, "file": given.file}
        where = [_SOURCES[source] for source, words in there.items() if words]
        raise SettingsError(
            f"there are an engine's own arguments {' and '.join(where)}, but the engine is "
            f"{engine}, which takes none"
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
        self._source = _SOURCES["file"]
        action = self._action(name)
        flag = action.option_strings[0]
        if value is None:
            return []
        if isinstance(value, bool) and isinstance(action, argparse.BooleanOptionalAction):
            negated = next(each for each in action.option_strings if each.startswith("--no-"))
            option = "--" + _plain_name(name).replace("_", "-")
            no = option.startswith("--no-") and "--" + option[5:] in action.option_strings
            return [flag if value is not no else negated]
        if isinstance(value, bool) and action.nargs == 0:
            return [flag] if value else []
        if action.nargs == 0:
            self.error(f"{name} is true or false, not {value!r}")
        if isinstance(value, list):
            return [flag, *(_text(each) for each in value)]
        return [f"{flag}={_text(value)}"]

    def read(self, words: Sequence[str], source: str) -> dict[str, ReadArgument]:
        self._source = _SOURCES[source]
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


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
