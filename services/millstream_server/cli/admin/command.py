"""The command `millstream admin`: its parser; what its commands do is imported when they run."""

from __future__ import annotations

import argparse
from pathlib import Path

from millstream_server.cli.admin.commands import COMMANDS, AdminCommand
from millstream_server.cli.connection import add_tls
from millstream_server.cli.flags import Commands, command, list_examples
from millstream_server.cli.suite.running import DEFAULT_LOG_DIR

_NOTES = """\
Each command calls the admin port (--admin-listen) of every server that is named, at the same time.
Exit code 0: all did it; 1: one failed; 2: a flag is wrong. Results go to stdout, progress and
errors to stderr; with --json all are lines of JSON on stdout.
`millstream admin COMMAND --help` explains a command.
"""


def add_admin(commands: Commands) -> None:
    """Add the command and those below it."""
    parser = command(
        commands,
        "admin",
        run,
        "Operate running workers: drain, weights, adapters, memory, profiles, logs.",
        _NOTES,
        "millstream admin status --all                # of the suite that `millstream up` runs",
        "millstream admin drain --admin 127.0.0.1:9565",
        "millstream admin update-weights --weight-version step-200 --path /models/step-200 --all",
    )
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in COMMANDS:
        _add(below, entry)


def _add(commands: Commands, entry: AdminCommand) -> None:
    parser = commands.add_parser(
        entry.name,
        help=entry.sentence,
        description=f"{entry.sentence}\n\n{entry.notes}",
        epilog=list_examples(f"millstream admin {entry.example}"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, admin_command=entry)
    entry.add_flags(parser)
    _add_servers(parser, entry)
    add_tls(parser)
    parser.add_argument("--json", action="store_true", help="print lines of JSON")


def _add_servers(parser: argparse.ArgumentParser, entry: AdminCommand) -> None:
    group = parser.add_argument_group("servers", "--admin, or --all")
    group.add_argument(
        "--admin",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="admin address, or a name in the table of `millstream up`, such as decode-1; may be "
        "repeated",
    )
    what = "workers" if entry.of_workers else "servers"
    group.add_argument(
        "--all", action="store_true", help=f"all {what} of the suite that `millstream up` runs"
    )
    group.add_argument(
        "--model", default="", metavar="NAME", help="with --all: only workers of this model"
    )
    group.add_argument(
        "--log-dir",
        type=Path,
        default=DEFAULT_LOG_DIR,
        metavar="DIR",
        help="the suite's, as `millstream up` was told (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Call the servers; return the exit code."""
    from millstream_server.cli.admin.operate import operate  # noqa: PLC0415 - starts quickly

    return operate(args)
