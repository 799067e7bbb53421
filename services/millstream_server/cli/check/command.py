"""The command `millstream check` and its flags; what it does is imported when it runs."""

from __future__ import annotations

import argparse
import asyncio

from millstream_server.cli.flags import (
    WRONG_USAGE,
    Commands,
    add_connection,
    add_server,
    add_timeout,
    command,
    fail,
    flag,
    flags,
    read_connection,
)

_HELP = """\
Check a whole deployment through its Processor.

Connects, asks for health, lists services by reflection and models, and sends every model the
smallest request of what it does. Each step is one line, with ✓ or ✗; a failed one says what to do.
Exit code 0: all passed; 1: one failed; 2: a flag is wrong. An API key comes from --api-key-file or
the environment, MILLSTREAM_API_KEY.

examples:
  millstream check processor.example:50051 --wait 300
  millstream check 127.0.0.1:50051 --tls-ca-file ca.pem --api-key-file key
  millstream check --model llama --disaggregated llama
"""


def add_check(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "check", run, _HELP)
    add_server(parser)
    add_connection(parser)
    wait = "wait so long for the server and its models (default: not at all)"
    flag(parser, "--wait SECONDS", wait, default=0.0)
    add_timeout(parser, 60.0, "longest time for each request")
    table = {
        "--model NAME": "check this model, and no other that isn't named (default: all)",
        "--disaggregated NAME": "fail unless prefill and decode workers answer for this model",
    }
    flags(parser, table, action="append", default=[])


def run(args: argparse.Namespace) -> int:
    """Check; return the exit code."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from millstream_server.cli.check.deployment import Wanted, check  # noqa: PLC0415 - see above
    from millstream_server.cli.client import connect  # noqa: PLC0415

    try:
        server = read_connection(args)
        client = connect(server)
    except (OSError, ValueError) as error:
        return fail(error, WRONG_USAGE)
    wanted = Wanted(
        server=server,
        wait_s=args.wait,
        timeout_s=args.timeout_s,
        models=frozenset(args.model) | frozenset(args.disaggregated if args.model else ()),
        disaggregated=frozenset(args.disaggregated),
    )
    async with client:
        return await check(client, wanted)
