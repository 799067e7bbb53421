"""What the flags of several commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from millstream_server.cli.client import DEFAULT_ADDRESS

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


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that send requests."""
    add_address(parser)
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model to ask (default: the only one served)"
    )
    parser.add_argument(
        "--show-usage", action="store_true", help="print times and token counts to stderr"
    )
