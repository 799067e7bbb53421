"""The `millstream` command line: commands and their flags."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from millstream_client import Image, Video
from millstream_server.cli import chat, complete, doctor, models, up
from millstream_server.cli.client import DEFAULT_ADDRESS, INTERRUPTED
from millstream_server.cli.sampling import add_sampling_flags, whole_number
from millstream_server.routing.policy import PolicyName
from millstream_server.worker.settings import EngineKind

_UP_NOTES = """\
Every service has its own log file. The phases of its start are shown here, and it is restarted if
it ends. Ctrl-C lets running requests finish; a second Ctrl-C kills. Set further settings of
services in the environment, for example MILLSTREAM_LOG_LEVEL=debug or MILLSTREAM_DTYPE=float32.
--engine simulated needs no GPU stack.
"""
_CHAT_NOTES = """\
One chat is one gRPC stream, so the conversation keeps its worker and its KV cache. Ctrl-C stops an
answer and keeps the conversation; Ctrl-D ends the chat. Inside a chat /image FILE attaches a
picture to the next message; /help lists all commands. `--once -` reads the text from stdin:
git diff | millstream chat --system 'Summarise this change.' --once -
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    args = make_parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()


def _reader_left() -> int:
    """End quietly when the reader of our output has closed it, as `head` does."""
    # Else Python flushes stdout at exit and reports an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of all commands; `run` of its result is the command's function."""
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Serve large language models as a suite of gRPC services, and chat with them.",
        epilog=_examples(
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
    _add_chat(commands)
    _add_complete(commands)
    _add_models(commands)
    _add_doctor(commands)
    return parser


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001 - it has no public name


def _examples(*lines: str) -> str:
    return "examples:\n" + "\n".join(f"  {line}" for line in lines)


def _command(
    commands: _Commands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    sentence: str,
    notes: str,
    *examples: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=sentence,
        description=f"{sentence}\n\n{notes}",
        epilog=_examples(*examples),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _add_up(commands: _Commands) -> None:
    parser = _command(
        commands,
        "up",
        up.run,
        "Start the whole suite on this machine, each service its own process.",
        _UP_NOTES,
        "millstream up",
        "millstream up --model ~/models/Qwen3-0.6B --topology aggregated",
        "millstream up --multimodal                                # chat about pictures",
    )
    _add_model_dir(parser)
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
        default=Path(".millstream/logs"),
        metavar="DIR",
        help="where each service's log goes (default: %(default)s)",
    )


def _add_chat(commands: _Commands) -> None:
    parser = _command(
        commands,
        "chat",
        chat.run,
        "Chat with a model; answers stream.",
        _CHAT_NOTES,
        "millstream chat",
        'millstream chat --once "What is Millstream?" --temperature 0',
        'millstream chat --image cat.png --once "What is it?"',
    )
    _add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model")
    parser.add_argument(
        "--once", metavar="TEXT", help="print one answer and exit; - reads the text from stdin"
    )
    _add_media(parser)
    add_sampling_flags(parser)


def _add_media(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "images and videos", "for models that take them; `millstream models` shows which do"
    )
    formats = {Image: "PNG, JPEG, WebP, GIF", Video: "MP4, MOV, WebM, MKV"}
    for kind, names in formats.items():
        group.add_argument(
            f"--{kind.kind}",
            dest="media",
            action="append",
            type=kind,
            default=[],
            metavar="FILE",
            help=f"send this {kind.kind} with the first message: {names}; may be repeated",
        )


def _add_complete(commands: _Commands) -> None:
    parser = _command(
        commands,
        "complete",
        complete.run,
        "Continue a raw prompt, without the model's chat template.",
        "",
        'millstream complete "Millstream is" --max-new-tokens 40',
        "millstream complete - --temperature 0 --show-usage < prompt.txt",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads it from stdin")
    _add_target(parser)
    add_sampling_flags(parser)


def _add_models(commands: _Commands) -> None:
    parser = _command(
        commands,
        "models",
        models.run,
        "List the models that are served and their workers.",
        "",
        "millstream models",
        "millstream models --address processor.example:50051",
    )
    _add_address(parser)


def _add_doctor(commands: _Commands) -> None:
    parser = _command(
        commands,
        "doctor",
        doctor.run,
        "Check this machine and advise what to do about each miss.",
        "A line is ok, warn (works, or not needed everywhere) or miss. The exit code is 1 if one is"
        " a miss.",
        "millstream doctor",
        "millstream doctor --model ~/models/Qwen3-0.6B",
    )
    _add_model_dir(parser)
    _add_address(parser)


def _add_model_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="model directory (default: demo/model)"
    )


def _add_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--address",
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="the suite's Processor (default: %(default)s)",
    )


def _add_target(parser: argparse.ArgumentParser) -> None:
    _add_address(parser)
    parser.add_argument(
        "--model", default="", metavar="NAME", help="model to ask (default: the only one served)"
    )
    parser.add_argument(
        "--show-usage", action="store_true", help="print times and token counts to stderr"
    )
