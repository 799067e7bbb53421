"""What the flags of several commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from millstream_server.cli.connection import add_connection

DEFAULT_ADDRESS = "127.0.0.1:50051"

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no public name


def list_examples(*lines: str) -> str:
    """Return the epilog of a command's help."""
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def command(
    commands: Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    sentence: str,
    notes: str,
    *examples: str,
) -> argparse.ArgumentParser:
    """Add a command; ``run`` is its function."""
    parser = commands.add_parser(
        name,
        help=sentence,
        description=f"{sentence}\n\n{notes}",
        epilog=list_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_model_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a model's directory."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="model directory (default: demo/model)"
    )


def add_address(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the Processor."""
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the suite's Processor (default: %(default)s)",
    )


def add_processor(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the Processor and say how to connect to it."""
    add_address(parser)
    add_connection(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that send requests."""
    add_processor(parser)
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model to ask (default: the only one served)"
    )
    parser.add_argument(
        "--show-usage", action="store_true", help="print times and token counts to stderr"
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the server to look at; `connection` has the flags that go with it."""
    parser.add_argument(
        "address",
        nargs="?",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the server (default: %(default)s)",
    )


def add_timeout(parser: argparse.ArgumentParser, default_s: float, what: str) -> None:
    """Add the flag that bounds each call; ``what`` is bounded."""
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=default_s,
        metavar="SECONDS",
        help=f"{what} (default: %(default)s)",
    )


def positive_seconds(text: str) -> float:
    """Parse a flag's number of seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above zero.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds
