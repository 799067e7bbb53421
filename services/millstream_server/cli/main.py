"""The `millstream` command line: what can be said, and who does it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

from millstream_server.cli import chat, complete, doctor, models, up
from millstream_server.cli.client import DEFAULT_ADDRESS, INTERRUPTED
from millstream_server.cli.sampling import add_sampling_flags, whole_number
from millstream_server.routing.policy import PolicyName
from millstream_server.worker.settings import EngineKind

_UP_NOTES = """\
Every service logs to a file of its own, tells here how far it has come, and is started again when
it dies. Ctrl-C lets running requests finish; a second Ctrl-C kills. Further settings of services
come from the environment, for example MILLSTREAM_LOG_LEVEL=debug or MILLSTREAM_DTYPE=float32.
"""
_CHAT_NOTES = """\
One chat is one gRPC stream, so the conversation keeps its worker and its KV cache. Ctrl-C stops an
answer and keeps the conversation; Ctrl-D leaves.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; answers the exit code."""
    args = _parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        return run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()


def _reader_left() -> int:
    """End quietly when the reader of our output has enough, as `head` does."""
    # Python would flush stdout once more at exit and complain.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="millstream",
        description="Serve large language models as a suite of gRPC services, and talk to them.",
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


_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # noqa: SLF001  # it has no public name


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
        "millstream up --engine simulated --prefill 2 --decode 4   # no GPU stack needed",
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
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}", type=int, default=1, metavar="N", help=f"{role} workers (default: 1)"
        )
    parser.add_argument(
        "--policy",
        choices=[policy.value for policy in PolicyName],
        default=PolicyName.LEAST_LOADED.value,
        help="which worker gets a request (default: %(default)s)",
    )
    _add_places(parser)


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
        "Talk to a model; the answer streams.",
        _CHAT_NOTES,
        "millstream chat",
        'millstream chat --once "What is Millstream?" --temperature 0',
        "git diff | millstream chat --system 'Summarise this change.' --once -",
    )
    _add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions to the model")
    parser.add_argument(
        "--once", metavar="TEXT", help="print one answer and leave; - reads the text from stdin"
    )
    add_sampling_flags(parser)


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
        "Check this machine and say what to do about each miss.",
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
