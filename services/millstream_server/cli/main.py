"""The `millstream` command line: commands and their flags."""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
from collections.abc import Sequence

from millstream_server.cli import up
from millstream_server.cli.chat import add_chat, add_complete
from millstream_server.cli.completion import add_completion
from millstream_server.cli.doctor import add_doctor
from millstream_server.cli.entry import add_plain, run
from millstream_server.cli.flags import (
    Commands,
    add_address,
    add_connection,
    add_log_dir,
    add_model_dir,
    add_timeout,
    command,
    fail,
    flag,
    flags,
    positive_seconds,
    whole_number,
)
from millstream_server.cli.generate_media import add_image, add_video
from millstream_server.cli.parser import Parser
from millstream_server.cli.rendering import add_parse, add_render
from millstream_server.cli.top.rows import SORTS
from millstream_server.cli.vectors import add_embed, add_models, add_rerank
from millstream_server.engines.registry import DIFFUSERS, GENERATORS
from millstream_server.routing.policy import PolicyName

_EXAMPLES = """\
examples:
  millstream doctor                            # is this machine ready?
  millstream up                                # start a suite
  millstream chat "What is Millstream?"        # ask it
"""
_UP = """\
Start the whole suite on this machine, each service its own process.

Every service has its own log file. The phases of its start are shown here, and it is restarted if
it ends. Ctrl-C lets running requests finish; a second Ctrl-C kills. Set further settings of
services in the environment, for example MILLSTREAM_LOG_LEVEL=debug.
The engine's own arguments follow --; the prefill and decode workers get them.
--engine simulated needs no GPU stack.

examples:
  millstream up
  millstream up --model ~/models/Qwen3-0.6B --topology aggregated -- --page-size 16
  millstream up --all            # images in chats, images from words, vectors, ranking
"""

_SHORTEST_S, _LONGEST_S = 0.2, 60.0
_TOP = """\
Show the Processor, workers and their load in tables that renew themselves.

Without --workers it shows the suite that `millstream up` runs in this directory. Ctrl-C ends it.
Of the Processor: requests that run and wait, rates over five seconds, the mean time to the first
token. "cached now" is the share of prompt tokens found in the KV cache since the last refresh,
"in all" since the worker's start; "progress" is when the engine last moved. Without a terminal it
prints a plain table every interval; --once prints one and ends, with code 1 if no worker is
reached.

examples:
  millstream top
  millstream top --workers k8s:shop/llm-workers --address k8s:shop/llm-processors --sort kv
  millstream top --once --json --workers 127.0.0.1:50061,127.0.0.1:50071
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    return run(parse(argv))


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
    parser = Parser(
        prog="millstream",
        description="Serve large language models as a suite of gRPC services, and chat with them.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    version = importlib.metadata.version("millstream")
    parser.add_argument("--version", action="version", version=f"millstream {version}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_up(commands)
    add_chat(commands)
    add_complete(commands)
    add_render(commands)
    add_parse(commands)
    add_image(commands)
    add_video(commands)
    add_embed(commands)
    add_rerank(commands)
    add_models(commands)
    _add_top(commands)
    add_doctor(commands)
    add_completion(commands, parser)
    add_plain(commands)
    return parser


def _add_up(commands: Commands) -> None:
    parser = command(commands, "up", up.run, _UP)
    add_model_dir(parser)
    flag(parser, "--model-name NAME", "name to serve it under (default: DIR's)", default="")
    flag(
        parser,
        "--topology",
        "prefill and decode apart, or both in one worker",
        choices=("disaggregated", "aggregated"),
    )
    flag(parser, "--engine", "what computes the tokens", choices=GENERATORS.names)
    flag(
        parser,
        "--multimodal",
        "take images and videos: adds an encode worker (default model: demo/vision/model)",
    )
    encode = "encode workers; includes --multimodal (default: 1 with it, else none)"
    flag(parser, "--encode N", encode, type=whole_number(64, 1))
    for role in ("prefill", "decode"):
        flag(parser, f"--{role} N", f"{role} workers (default: 1)", default=1)
    _add_further(parser)
    policies, default = [policy.value for policy in PolicyName], PolicyName.LEAST_LOADED.value
    flag(parser, "--policy", "which worker gets a request", choices=policies, default=default)
    _add_places(parser)


def _add_further(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("further models", "each gets one worker of its own")
    table = {
        "--all": "every service: --multimodal, and the demo models for images, vectors, ranking "
        "and text by diffusion",
        "--image-model DIR": "makes images: a folder with model_index.json",
        "--embedding-model DIR": "turns texts into vectors",
        "--rerank-model DIR": "ranks documents: a cross-encoder",
        "--dllm-model DIR": "a diffusion language model",
    }
    flags(group, table)
    engines, ours = DIFFUSERS.names, "diffusers"
    flag(group, "--image-engine", "what makes the images", choices=engines, default=ours)


def _add_places(parser: argparse.ArgumentParser) -> None:
    flag(parser, "--host", "address the Processor listens on", default="127.0.0.1")
    flag(
        parser,
        "--port PORT",
        "port of the Processor; all other ports are then above it, the next hundred or so "
        "(default: 50051, or the next free one, and the ports in docs/operations.md)",
        type=whole_number(65535, 1),
    )
    add_log_dir(parser, "where each service's log goes")


def _add_top(commands: Commands) -> None:
    parser = command(commands, "top", _run_top, _TOP)
    flag(
        parser,
        "--workers W[,W…]",
        "HOST:PORT, dns:NAME:PORT, k8s:SERVICE, k8s:NAMESPACE/SERVICE or file:PATH, as for "
        "the Processor (default: the suite of `millstream up`)",
        default="",
    )
    add_address(parser, "Processors, to show what waits there too, also k8s:NAMESPACE/SERVICE", "")
    add_log_dir(parser, "that suite's, as `millstream up` was told")
    interval = f"time between refreshes, {_SHORTEST_S:g} to {_LONGEST_S:g}"
    flag(parser, "--interval SECONDS", interval, type=_interval, default=1.0)
    flag(parser, "--sort", "order of workers", choices=tuple(SORTS))
    flag(parser, "--once", "measure for one interval, print one table, and end")
    flag(parser, "--json", "print a line of JSON each time")
    add_timeout(parser, 5.0, "with --once: longest time to wait for what workers tell")
    add_connection(parser)
    name = "name in the workers' certificates (default: --tls-server-name, else the chart's)"
    flag(parser, "--worker-tls-name NAME", name, default="")


def _interval(text: str) -> float:
    seconds = positive_seconds(text)
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of seconds from {_SHORTEST_S:g} to {_LONGEST_S:g}"
        )
    return seconds


def _run_top(args: argparse.Namespace) -> int:
    try:
        from millstream_server.cli.top.show import show  # noqa: PLC0415 - not for other commands
    except ModuleNotFoundError as error:
        return fail(f"top needs {error.name}: pip install 'millstream[cli,processor]'")
    return show(args)
