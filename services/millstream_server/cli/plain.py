"""The commands that run where only a service is installed: without colours, and started quickly."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from millstream_server.cli.admin.command import add_admin
from millstream_server.cli.check.command import add_check
from millstream_server.cli.flags import Commands
from millstream_server.cli.health import add_health

_INTERRUPTED = 130


def add_plain(commands: Commands) -> None:
    """Add the commands."""
    add_admin(commands)
    add_check(commands)
    add_health(commands)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of these commands; return the exit code."""
    parser = argparse.ArgumentParser(prog="millstream", allow_abbrev=False)
    add_plain(parser.add_subparsers(title="commands", metavar="COMMAND", required=True))
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return _INTERRUPTED
