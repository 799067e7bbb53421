"""The command `millstream check` and its flags; what it does is imported when it runs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from millstream_server.cli.flags import Commands, add_server, command, positive_seconds, wants_tls

if TYPE_CHECKING:
    from millstream_client import Client

KEY_VARIABLE = "MILLSTREAM_API_KEY"
_WRONG_USAGE = 2
_NOTES = f"""\
Connects, asks for health, lists services by reflection and models, and sends every model the
smallest request of what it does. Each step is one line, with ✓ or ✗; a failed one says what to do.
Exit code 0: all passed; 1: one failed; 2: a flag is wrong. An API key comes from --api-key-file or
the environment, {KEY_VARIABLE}.
"""


def add_check(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands,
        "check",
        run,
        "Check a whole deployment through its Processor.",
        _NOTES,
        "millstream check processor.example:50051 --wait 300",
        "millstream check 127.0.0.1:50051 --tls-ca-file ca.pem --api-key-file key",
        "millstream check --model llama --disaggregated llama",
    )
    add_server(parser)
    _add_key(parser)
    parser.add_argument(
        "--wait",
        type=positive_seconds,
        default=0.0,
        metavar="SECONDS",
        help="wait so long for the server and its models (default: not at all)",
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="longest time for each request (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="check this model, and no other that isn't named (default: all)",
    )
    parser.add_argument(
        "--disaggregated",
        action="append",
        default=[],
        metavar="NAME",
        help="fail unless prefill and decode workers answer for this model",
    )


def _add_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file that holds the API key alone"
    )
    parser.add_argument(
        "--allow-plaintext-key",
        action="store_true",
        help="send the key without TLS to another machine, on a network that is trusted",
    )


def run(args: argparse.Namespace) -> int:
    """Check; return the exit code."""
    return asyncio.run(_run(args))


async def _run(args: argparse.Namespace) -> int:
    from millstream_server.cli.check.deployment import Wanted, check  # noqa: PLC0415 - see above

    try:
        client = _open(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return _WRONG_USAGE
    wanted = Wanted(
        address=args.address,
        wait_s=args.wait,
        timeout_s=args.timeout_s,
        models=frozenset(args.model) | frozenset(args.disaggregated if args.model else ()),
        disaggregated=frozenset(args.disaggregated),
        tls=wants_tls(args),
    )
    async with client:
        return await check(client, wanted)


def _open(args: argparse.Namespace) -> Client:
    """Make the client.

    Raises:
        ValueError: the address is invalid, or the flags contradict each other.
        OSError: a file can't be read.
    """
    from millstream_client import NO_RETRY, Client, Options, Tls  # noqa: PLC0415
    from millstream_client.service_config import ONE_SERVER  # noqa: PLC0415
    from millstream_client.target import parse_target  # noqa: PLC0415

    key = os.environ.get(KEY_VARIABLE, "")
    if args.api_key_file is not None:
        key = args.api_key_file.read_text().strip()
    tls = Tls(
        ca_file=args.tls_ca_file,
        cert_file=args.tls_cert_file,
        key_file=args.tls_key_file,
        server_name=args.tls_server_name,
    )
    if key and not (
        wants_tls(args) or args.allow_plaintext_key or parse_target(args.address).loopback
    ):
        raise ValueError(
            f"the API key would be sent to {args.address} unencrypted: give --tls-ca-file, or, on "
            "a network that is trusted, --allow-plaintext-key"
        )
    options = Options(
        service_config=ONE_SERVER,
        max_reconnect_pause_s=0.5,
        allow_plaintext_key=args.allow_plaintext_key,
    )
    return Client(
        args.address,
        api_key=key or None,
        tls=tls if wants_tls(args) else None,
        retry=NO_RETRY,
        options=options,
    )
