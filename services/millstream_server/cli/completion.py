"""`millstream completion`: prints what a shell completes commands, flags and files with."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millstream_server.cli.flags import NEEDS_EXTRA, Commands, command, fail, flag

_SHELLS = ("bash", "zsh", "fish")
_HELP = """\
Print a script that lets a shell complete commands and flags.

It knows this version's commands and flags: print it again after an upgrade. To have it in every
new shell:
  bash: add to ~/.bashrc: eval "$(millstream completion bash)"
  zsh:  millstream completion zsh > "${fpath[1]}/_millstream"
  fish: millstream completion fish > ~/.config/fish/completions/millstream.fish

examples:
  eval "$(millstream completion bash)"
  millstream completion fish > ~/.config/fish/completions/millstream.fish
"""


def add_completion(commands: Commands, whole: argparse.ArgumentParser) -> None:
    """Add the command; it completes the commands of ``whole``."""
    parser = command(commands, "completion", lambda args: _run(args, whole), _HELP)
    flag(parser, "shell SHELL", ", ".join(_SHELLS), choices=_SHELLS)


def _run(args: argparse.Namespace, whole: argparse.ArgumentParser) -> int:
    try:
        import shtab  # noqa: PLC0415 - no other command needs it
    except ModuleNotFoundError:
        return fail(NEEDS_EXTRA)
    for action in _actions(whole):
        of_path = action.type is Path or action.metavar == "FILE"
        if of_path:
            told: Any = action
            told.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    print(shtab.complete(whole, args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yield all arguments of a parser and of the commands below it."""
    for action in parser._actions:  # noqa: SLF001 - argparse has no public way
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for below in dict.fromkeys(action.choices.values()):
                yield from _actions(below)
