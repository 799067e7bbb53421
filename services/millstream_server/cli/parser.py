"""The parser of all commands: what it doesn't know is explained by the command that was meant."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class Parser(argparse.ArgumentParser):
    """Refuses unknown words with the command's own usage, and names the nearest flag or command."""

    def parse_known_args(  # type: ignore[override]  # the stubs have an overload for each argument
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse; nothing is left, since a parser of a command is asked by this method, too."""
        found, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._unknown(left))
        return found, left

    def _unknown(self, left: Sequence[str]) -> str:
        flags = [word.partition("=")[0] for word in left if word.startswith("-") and word != "-"]
        if flags:
            return f"there is no {flags[0]}{nearest(flags[0], self._option_string_actions)}"
        return f"what is {left[0]!r}? A text of several words stands in quotes"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        commands = isinstance(action, argparse._SubParsersAction)  # noqa: SLF001 - no public name
        if commands and action.choices is not None and value not in action.choices:
            advice = nearest(value, action.choices) or "; --help lists all"
            raise argparse.ArgumentError(None, f"there is no command {value!r}{advice}")
        super()._check_value(action, value)


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that names the known word which is most like ``word``."""
    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""
