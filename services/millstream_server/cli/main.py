"""The `millstream` command line: commands and their flags."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream_server.cli import doctor, models, up
from millstream_server.cli.client import INTERRUPTED
from millstream_server.cli.flags import (
    Commands,
    add_address,
    add_model_dir,
    add_processor,
    command,
    list_examples,
)
from millstream_server.cli.plain import add_plain
from millstream_server.cli.requests import add_requests
from millstream_server.cli.sampling import whole_number
from millstream_server.cli.suite.running import DEFAULT_LOG_DIR
from millstream_server.cli.top.command import add_top
from millstream_server.routing.policy import PolicyName
from millstream_server.worker.settings import EngineKind

_UP_NOTES = """\
Every service has its own log file. The phases of its start are shown here, and it is restarted if
it ends. Ctrl-C lets running requests finish; a second Ctrl-C kills. Set further settings of
services in the environment, for example MILLSTREAM_LOG_LEVEL=debug.
The engine's own arguments follow --; the prefill and decode workers get them.
--engine simulated needs no GPU stack.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = parse(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read a command line; `up` takes the engine's own arguments behind `--`."""
    words = list(sys.argv[1:] if argv is None else argv)
    behind: list[str] = []
    if words[:1] == ["up"] and "--" in words:
        at = words.index("--")
        words, behind = words[:at], words[at + 1 :]
    args = make_parser().parse_args(words)
    args.engine_args = tuple(behind)
    return args


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; `run` of its result is the command's function."""
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Serve large language models as a suite of gRPC services, and chat with them.",
        epilog=list_examples(
            "millstream doctor                            # is this machine ready?",
            "millstream up                                # start a suite",
            'millstream chat --once "What is Millstream?" # ask it',
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = importlib.metadata.version("millstream")
    parser.add_argument("--version", action="version", version=f"millstream {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    add_requests(commands)
    _add_models(commands)
    add_top(commands)
    _add_doctor(commands)
    add_plain(commands)
    return parser


def _add_up(commands: Commands) -> None:
    parser = command(
        commands,
        "up",
        up.run,
        "Start the whole suite on this machine, each service its own process.",
        _UP_NOTES,
        "millstream up",
        "millstream up --model ~/models/Qwen3-0.6B --topology aggregated -- --page-size 16",
        "millstream up --all            # images in chats, images from words, vectors, ranking",
    )
    add_model_dir(parser)
    parser.add_argument(
        "--model-name", default="", metavar="NAME", help="name to serve it under (default: DIR's)"
    )
    parser.add_argument(
        "--topology",
        choices=("disaggregated", "aggregated"),
        default="disaggregated",
        help="prefill and decode apart, or both in one worker (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=[kind.value for kind in EngineKind],
        default=EngineKind.SGLANG.value,
        help="what computes the tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--multimodal",
        action="store_true",
        help="take images and videos: adds an encode worker (default model: demo/vision/model)",
    )
    _add_workers(parser)
    _add_further(parser)
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in PolicyName],
        default=PolicyName.LEAST_LOADED.value,
        help="which worker gets a request (default: %(default)s)",
    )
    _add_places(parser)


def _add_workers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--encode",
        type=whole_number(64, 1),
        metavar="N",
        help="encode workers; includes --multimodal (default: 1 with it, else none)",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=int, default=1, metavar="N", help=f"{role} workers (default: 1)"
        )


def _add_further(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("further models", "each gets one worker of its own")
    group.add_argument(
        "--all",
        action="store_true",
        help="every service: --multimodal, and the demo models for images, vectors, ranking and "
        "text by diffusion",
    )
    for flag, help_ in {
        "--image-model": "makes images: a folder with model_index.json",
        "--embedding-model": "turns texts into vectors",
        "--rerank-model": "ranks documents: a cross-encoder",
        "--dllm-model": "a diffusion language model",
    }.items():
        group.add_argument(flag, type=Path, metavar="DIR", help=help_)
    group.add_argument(
        "--image-engine",
        choices=("diffusers", "sglang"),
        default="diffusers",
        help="what makes the images (default: %(default)s)",
    )


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address the Processor listens on (default: %(default)s)",
    )
    parser.add_argument(
        "--port",
        type=whole_number(65535, 1),
        metavar="PORT",
        help="port of the Processor (default: 50051, or the next free one)",
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        default=DEFAULT_LOG_DIR,
        metavar="DIR",
        help="where each service's log goes (default: %(default)s)",
    )


def _add_models(commands: Commands) -> None:
    parser = command(
        commands,
        "models",
        models.run,
        "List the models that are served and their workers.",
        "",
        "millstream models",
        "millstream models --address processor.example:50051 --tls-ca-file ca.pem",
    )
    add_processor(parser)


def _add_doctor(commands: Commands) -> None:
    parser = command(
        commands,
        "doctor",
        doctor.run,
        "Check this machine and advise what to do about each miss.",
        "A line is ok, warn (works, or not needed everywhere) or miss. The exit code is 1 if one is"
        " a miss.",
        "millstream doctor",
        "millstream doctor --model ~/models/Qwen3-0.6B",
    )
    add_model_dir(parser)
    add_address(parser)
