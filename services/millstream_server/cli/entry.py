"""The entry point of `millstream`; commands of a lean install run without colours, quickly."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from millstream_server.cli.admin.commands import add_admin
from millstream_server.cli.check.command import add_check
from millstream_server.cli.flags import INTERRUPTED, NEEDS_EXTRA, Commands, fail
from millstream_server.cli.health import add_health
from millstream_server.cli.parser import Parser

_PLAIN = ("health", "check", "admin")


def add_plain(commands: Commands) -> None:
    """Add the commands."""
    add_admin(commands)
    add_check(commands)
    add_health(commands)


def run_plain(argv: Sequence[str] | None = None) -> int:
    """Run one of these commands; return the exit code."""
    parser = Parser(prog="millstream", allow_abbrev=False)
    add_plain(parser.add_subparsers(title="commands", metavar="COMMAND", required=True))
    return run(parser.parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Run a command that was parsed; return the exit code."""
    command: Callable[[argparse.Namespace], int] = args.run
    try:
        return command(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def main() -> int:
    """Run the command line; return the exit code."""
    try:
        code = _run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        # Else Python flushes stdout at exit and reports an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _run() -> int:
    if sys.argv[1:2] and sys.argv[1] in _PLAIN:
        return run_plain()
    try:
        from millstream_server.cli.main import main as run_any  # noqa: PLC0415 - it may fail
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "prompt_toolkit", "packaging"):
            raise
        return fail(NEEDS_EXTRA)
    return run_any()
