"""The command `millstream top` and its flags."""

from __future__ import annotations

import argparse
from pathlib import Path

from millstream_server.cli.connection import add_connection
from millstream_server.cli.flags import Commands, add_timeout, command, positive_seconds
from millstream_server.cli.suite.running import DEFAULT_LOG_DIR
from millstream_server.cli.top.rows import SORTS

_SHORTEST_S, _LONGEST_S = 0.2, 60.0
_NOTES = """\
Without --workers it shows the suite that `millstream up` runs in this directory. Ctrl-C ends it.
"cached now" is the share of prompt tokens found in the KV cache since the last refresh, "in all"
since the worker's start; "progress" is when the engine last moved. Without a terminal it prints a
plain table every interval; --once prints one and ends, with code 1 if no worker is reached.
"""


def add_top(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands,
        "top",
        run,
        "Show workers and their load in a table that renews itself.",
        _NOTES,
        "millstream top",
        "millstream top --workers k8s:shop/decode,k8s:shop/prefill --sort kv",
        "millstream top --once --json --workers 127.0.0.1:50061,127.0.0.1:50071",
    )
    parser.add_argument(
        "--workers",
        default="",
        metavar="W[,W…]",
        help="HOST:PORT, dns:NAME:PORT, k8s:SERVICE, k8s:NAMESPACE/SERVICE or file:PATH, as for "
        "the Processor (default: the suite of `millstream up`)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=DEFAULT_LOG_DIR,
        metavar="DIR",
        help="that suite's, as `millstream up` was told (default: %(default)s)",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=1.0,
        metavar="SECONDS",
        help=f"time between refreshes, {_SHORTEST_S:g} to {_LONGEST_S:g} (default: %(default)s)",
    )
    parser.add_argument(
        "--sort",
        choices=tuple(SORTS),
        default="role",
        help="order of workers (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="measure for one interval, print one table, and end"
    )
    parser.add_argument("--json", action="store_true", help="print a line of JSON each time")
    add_timeout(parser, 5.0, "with --once: longest time to wait for what workers tell")
    add_connection(parser)


def _interval(text: str) -> float:
    seconds = positive_seconds(text)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}"
        )
    return seconds


def run(args: argparse.Namespace) -> int:
    """Show the table; return the exit code."""
    from millstream_server.cli.top.show import show  # noqa: PLC0415 - not for other commands

    return show(args)
