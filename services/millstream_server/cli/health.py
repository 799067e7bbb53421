"""`millstream health`: asks a server for its health, as a container's exec probe.

It runs every few seconds beside a server that has better things to do, so it imports little.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream_server.cli.flags import Commands, add_server, command, positive_seconds, wants_tls

if TYPE_CHECKING:
    import grpc

SERVING, NOT_SERVING, WRONG_USAGE = 0, 1, 2
"""Exit codes."""

_NOTES = """\
Prints one line. Exit code 0: it is SERVING; 1: it is not, or can't be reached; 2: a flag is wrong.
"""


def add_health(commands: Commands) -> None:
    """Add the command."""
    parser = command(
        commands,
        "health",
        run,
        "Ask a server for its health, as a container's probe.",
        _NOTES,
        "millstream health",
        "millstream health 127.0.0.1:50051 --service millstream.v1.DecodeService",
        "millstream health 127.0.0.1:50051 --service liveness --tls-ca-file ca.pem",
    )
    add_server(parser)
    parser.add_argument(
        "--service", default="", metavar="NAME", help="health name (default: the whole server)"
    )
    parser.add_argument(
        "--timeout-s",
        type=positive_seconds,
        default=5.0,
        metavar="SECONDS",
        help="longest time until the reply (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Ask, print the line, and return the exit code."""
    try:
        channel = _open(args)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    with channel:
        code, line = _ask(channel, args)
    print(line)
    return code


def _open(args: argparse.Namespace) -> grpc.Channel:
    """Open the channel.

    Raises:
        ValueError: the address is not HOST:PORT, or the flags contradict each other.
        OSError: a file can't be read.
    """
    import grpc  # noqa: PLC0415 - `--help` needs none

    host, _, port = args.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{args.address!r} is not HOST:PORT")
    # Never through the proxy that the environment names: probes are for what is near.
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    if not wants_tls(args):
        return grpc.insecure_channel(args.address, options)
    if (args.tls_cert_file is None) != (args.tls_key_file is None):
        raise ValueError("--tls-cert-file and --tls-key-file belong together; one is missing")
    if args.tls_server_name:
        options.append(("grpc.ssl_target_name_override", args.tls_server_name))
    ca, key, cert = map(_read, (args.tls_ca_file, args.tls_key_file, args.tls_cert_file))
    return grpc.secure_channel(args.address, grpc.ssl_channel_credentials(ca, key, cert), options)


def _read(file: Path | None) -> bytes | None:
    return None if file is None else file.read_bytes()


def _ask(channel: grpc.Channel, args: argparse.Namespace) -> tuple[int, str]:
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    stub = health_pb2_grpc.HealthStub(channel)
    asked = f"{args.address} {args.service}".strip()
    try:
        reply = stub.Check(
            health_pb2.HealthCheckRequest(service=args.service), timeout=args.timeout_s
        )
    except grpc.RpcError as error:
        return NOT_SERVING, f"{asked}: {_explain(error, args.timeout_s)}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return (SERVING if name == "SERVING" else NOT_SERVING), f"{asked}: {name}"


def _explain(error: Any, timeout_s: float) -> str:
    """Return a failed call in a few words; never several lines."""
    code = error.code().name
    if code == "NOT_FOUND":
        return "the server has no service of this name"
    if code == "UNIMPLEMENTED":
        return "the server has no grpc.health.v1.Health"
    if code == "DEADLINE_EXCEEDED":
        return f"no reply within {timeout_s:g} s"
    return " ".join(f"can't be reached: {error.details()}".split())
