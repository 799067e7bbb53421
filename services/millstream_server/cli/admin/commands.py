"""The commands of `millstream admin` and their flags; no stubs, so that parsing starts quickly."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millstream_server.cli.flags import Commands, add_log_dir, add_timeout, add_tls, command, flag

Parser = argparse.ArgumentParser
Add = Callable[[Parser], None]
"""Adds flags of a command."""
_HELP = """\
Operate running workers: drain, weights, adapters, memory, profiles, logs.

Each command calls the admin port (--admin-listen) of every server that is named, at the same time.
Exit code 0: all did it; 1: one failed; 2: a flag is wrong. Results go to stdout, progress and
errors to stderr; with --json all are lines of JSON on stdout.
`millstream admin COMMAND --help` explains a command.

examples:
  millstream admin status --all                # of the suite that `millstream up` runs
  millstream admin drain --admin 127.0.0.1:9565
  millstream admin update-weights --weight-version step-200 --path /models/step-200 --all
"""


class AdminCommand(NamedTuple):
    """A command and its help."""

    name: str
    method: str
    """Of the service."""
    text: str
    """Its help around the flags."""
    of_workers: bool
    """False: every server has it, the Processor too."""


def _whole(least: int, most: int = (1 << 32) - 1) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return int(text)

    return parse


def _whole_list(text: str) -> list[int]:
    return [_whole(0)(part) for part in text.split(",")]


def _tag(text: str) -> str:
    tags = ("kv-cache", "weights", "cuda-graph")
    if text not in tags:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(tags)}")
    return text


def _weights(parser: Parser) -> None:
    flag(parser, "--weight-version NAME", "name of the new version", required=True)
    sources = parser.add_mutually_exclusive_group(required=True)
    flag(
        sources, "--path DIR", "checkpoint on the worker, below one of its --weights-dirs", type=str
    )
    flag(
        sources,
        "--safetensors FILE",
        "files here; their tensors (BF16, F16, F32) are sent, those of the model that aren't "
        "in them stay",
        nargs="+",
    )
    flag(
        sources,
        "--broadcast HOST:PORT",
        "rank 0 of a torch process group, which broadcasts the tensors",
    )
    flag(
        sources,
        "--ipc UUID=ADDRESS",
        "a GPU's UUID and the ZeroMQ address of its sender, on the worker; may be repeated",
        action="append",
    )


def _broadcast(parser: Parser) -> None:
    group = parser.add_argument_group("with --broadcast")
    flag(
        group,
        "--tensors FILE",
        "safetensors files; the tensors in their headers are broadcast, in their order",
        nargs="+",
        default=[],
    )
    flag(
        group,
        "--rank-offset N[,N…]",
        "rank of each worker's first process in the group, in the order of the workers",
        type=_whole_list,
        default=[],
    )
    flag(group, "--world-size N", "processes in the group", type=_whole(2))
    flag(group, "--group-name NAME", "its name", default="weights")
    flag(group, "--backend", "", choices=("nccl", "gloo"))


def _flag(usage: str, help_: str, **more: Any) -> Add:
    return lambda parser: flag(parser, usage, help_, **more)


_TIMEOUT: Add = partial(add_timeout, default_s=None, what="longest time to wait for open requests")
_TAGS = _flag("tags TAG", "kv-cache, weights, cuda-graph; none: all", nargs="*", type=_tag)
_ADAPTER = _flag("name NAME", "its name in requests")
_DIRECTORY = _flag(
    "path DIR", "its directory on the worker, below one of its --weights-dirs", type=str
)
_LEVELS = ("debug", "info", "warning", "error", "critical", "inherit")
_TABLE = """\
status --all
Print what operations have set, and what the engine can do.
Shows also the operation that runs now.

drain --admin decode-1.example:9564 --timeout-s 300
Take workers out of service and wait until no request is open.
For maintenance: the process goes on running, and stays out of service until
`undrain`. After --timeout-s with requests still open it fails; the worker still stays
out of service, and a second `drain` waits on.

undrain --admin decode-1.example:9564
Put drained workers back into service.
No effect on a worker that isn't drained.

pause --mode retract --admin 127.0.0.1:9565
Stop the engine's steps.
Requests that run wait until `continue`; routers use other workers meanwhile.

continue --admin 127.0.0.1:9565
Let the engine's steps go on.
No effect on a worker that isn't paused.

release-memory kv-cache weights --admin 127.0.0.1:9565
Let the engine give memory back.
The worker goes out of service, waits until no request is open, and stays out of
service until `resume-memory`. Prints the memory before and after, as measured; on a CPU
the engine only flushes its cache.

resume-memory --admin 127.0.0.1:9565
Take released memory again; back in service once nothing is released.
No effect when nothing is released.

update-weights --weight-version step-200 --path /models/step-200 --all
Replace the model's weights while the worker runs.
Weights are checked first; if they don't fit, the old ones serve on. Then the
worker goes out of service, open requests end with the old weights, the new ones are
loaded, and it is back in service. Update all workers of a model: name all of them with
--admin, or give --all --model.

flush-cache --drain --admin 127.0.0.1:9565
Empty the prefix cache.
Needs an engine without open requests; --drain waits for that.

start-profile --steps 20 --admin 127.0.0.1:9565
Begin to record what the engine does.
Files are written on the worker's machine; requests go on, more slowly.

stop-profile --admin 127.0.0.1:9565
End the recording and print where its files are.
Open the traces in a viewer such as Perfetto.

load-lora sql /adapters/sql --all
Load a LoRA adapter, which requests may then name.
Load it on all workers of a model: requests go only to workers that have it.

unload-lora sql --all
Remove a LoRA adapter.
New requests that name it are refused at once; running ones end first.

list-loras --all
List the loaded LoRA adapters.
With their ranks, and their directories on the worker.

server-status --admin 127.0.0.1:9564
Print a process's version, health, open work and settings.
For every server, the Processor too. Secrets are masked.

set-log-level debug --logger millstream_server.runtime --all
Set a logger's level, until the process restarts.
For every server, the Processor too. `inherit` undoes it.
"""
"""Each command as an example, whose first word is its name; a sentence; notes."""
_FLAGS: Mapping[str, Sequence[Add]] = {
    "drain": [_TIMEOUT],
    "pause": [
        _flag(
            "--mode",
            "running requests keep their KV cache, give it back and compute it again, or end "
            "with UNAVAILABLE",
            choices=("in-place", "retract", "abort"),
        )
    ],
    "release-memory": [_TAGS, _TIMEOUT],
    "resume-memory": [_TAGS],
    "update-weights": [_weights, _TIMEOUT, _broadcast],
    "flush-cache": [
        _flag(
            "--drain",
            "take the worker out of service until open requests have ended and it is empty",
        ),
        _TIMEOUT,
    ],
    "start-profile": [
        _flag(
            "--activity",
            "what to record; may be repeated (default: cpu, and gpu where there is one)",
            dest="activities",
            action="append",
            default=[],
            choices=("cpu", "gpu", "memory"),
        ),
        _flag(
            "--steps N",
            "stop after so many steps of the engine (default: record until stop-profile)",
            type=_whole(1),
            default=0,
        ),
    ],
    "load-lora": [_ADAPTER, _DIRECTORY],
    "unload-lora": [_ADAPTER],
    "set-log-level": [
        _flag("level", "inherit: the parent logger's level", choices=_LEVELS),
        _flag(
            "--logger NAME",
            "such as millstream_server.worker (default: the root logger)",
            default="",
        ),
    ],
}
"""Those that a command has of its own."""
_METHODS = {"status": "GetEngineState", "server-status": "GetServerStatus"}
"""Of commands that have another name than the method."""
_OF_ALL_SERVERS = ("server-status", "set-log-level")


def _read(entry: str) -> AdminCommand:
    example, sentence, notes = entry.split("\n", 2)
    name = example.split()[0]
    method = _METHODS.get(name) or name.title().replace("-", "")
    of_workers = name not in _OF_ALL_SERVERS
    text = f"{sentence}\n\n{notes}\n\nexamples:\n  millstream admin {example}"
    return AdminCommand(name, method, text, of_workers)


COMMANDS = tuple(map(_read, _TABLE.strip().split("\n\n")))


def add_admin(commands: Commands) -> None:
    """Add the command and those below it."""
    parser = command(commands, "admin", run, _HELP)
    below = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for entry in COMMANDS:
        one = command(below, entry.name, run, entry.text)
        one.set_defaults(admin_command=entry)
        for add in _FLAGS.get(entry.name, ()):
            add(one)
        _add_servers(one, entry)
        add_tls(one)
        flag(one, "--json", "print lines of JSON")


def _add_servers(parser: argparse.ArgumentParser, entry: AdminCommand) -> None:
    group = parser.add_argument_group("servers", "--admin, or --all")
    admin = "admin address, or a name in the table of `millstream up`, such as decode-1; may be "
    flag(group, "--admin HOST:PORT", f"{admin}repeated", action="append", default=[])
    what = "workers" if entry.of_workers else "servers"
    flag(group, "--all", f"all {what} of the suite that `millstream up` runs")
    flag(group, "--model NAME", "with --all: only workers of this model", default="")
    workers = "with --all: a cluster's workers, such as k8s:NAMESPACE/SERVICE, as for `top`"
    flag(group, "--workers W[,W…]", workers, default="")
    flag(group, "--admin-port PORT", "theirs", type=_whole(1), default=9564)
    add_log_dir(group, "the suite's, as `millstream up` was told")


def run(args: argparse.Namespace) -> int:
    """Call the servers; return the exit code."""
    from millstream_server.cli.admin.operate import operate  # noqa: PLC0415 - starts quickly

    return operate(args)
