"""`millstream health`: asks a server for its health, as a container's exec probe.

It runs every few seconds beside a server that has better things to do, so it imports little.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from millstream_server.cli.flags import (
    WRONG_USAGE,
    Commands,
    Destination,
    add_server,
    add_timeout,
    add_tls,
    command,
    explain_tls,
    fail,
    flag,
    read_tls,
)

if TYPE_CHECKING:
    import grpc

SERVING, NOT_SERVING = 0, 1
"""Exit codes."""

_HELP = """\
Ask a server for its health, as a container's probe.

Prints one line. Exit code 0: it is SERVING; 1: it is not, or can't be reached; 2: a flag is wrong.

examples:
  millstream health
  millstream health 127.0.0.1:50051 --service millstream.v1.DecodeService
  millstream health 127.0.0.1:50051 --service liveness --tls-ca-file ca.pem
"""


def add_health(commands: Commands) -> None:
    """Add the command."""
    parser = command(commands, "health", run, _HELP)
    add_server(parser)
    add_tls(parser)
    flag(parser, "--service NAME", "health name (default: the whole server)", default="")
    add_timeout(parser, 5.0, "longest time until the reply")


def run(args: argparse.Namespace) -> int:
    """Ask, print the line, and return the exit code."""
    try:
        server = read_tls(args)
        channel = _open(server)
    except (OSError, ValueError) as error:
        return fail(error, WRONG_USAGE)
    with channel:
        code, line = _ask(channel, server, args)
    print(line)
    return code


def _open(server: Destination) -> grpc.Channel:
    """Open the channel.

    Raises:
        ValueError: the address is not HOST:PORT.
        OSError: a file can't be read.
    """
    import grpc  # noqa: PLC0415 - `--help` needs none

    host, _, port = server.address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{server.address!r} is not HOST:PORT")
    # Never through the proxy that the environment names: probes are for what is near.
    options: list[tuple[str, Any]] = [("grpc.enable_http_proxy", 0), ("grpc.enable_retries", 0)]
    if not server.tls:
        return grpc.insecure_channel(server.address, options)
    if server.server_name:
        options.append(("grpc.ssl_target_name_override", server.server_name))
    files = (server.ca_file, server.key_file, server.cert_file)
    ca, key, cert = (file.read_bytes() if file is not None else None for file in files)
    return grpc.secure_channel(server.address, grpc.ssl_channel_credentials(ca, key, cert), options)


def _ask(channel: grpc.Channel, server: Destination, args: argparse.Namespace) -> tuple[int, str]:
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    stub = health_pb2_grpc.HealthStub(channel)
    asked = f"{args.address} {args.service}".strip()
    try:
        reply = stub.Check(
            health_pb2.HealthCheckRequest(service=args.service), timeout=args.timeout_s
        )
    except grpc.RpcError as error:
        return NOT_SERVING, f"{asked}: {_explain(error, server, args.timeout_s)}"
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
    return (SERVING if name == "SERVING" else NOT_SERVING), f"{asked}: {name}"


def _explain(error: Any, server: Destination, timeout_s: float) -> str:
    """Return a failed call in a few words; never several lines."""
    code = error.code().name
    if code == "NOT_FOUND":
        return "the server has no service of this name"
    if code == "UNIMPLEMENTED":
        return "the server has no grpc.health.v1.Health"
    if code == "DEADLINE_EXCEEDED":
        return f"no reply within {timeout_s:g} s"
    why = explain_tls(error.details(), server) or error.details()
    return " ".join(f"can't be reached: {why}".split())
