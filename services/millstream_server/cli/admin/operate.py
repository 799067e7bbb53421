"""Runs a command on all servers at the same time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from typing import Any

import grpc

from millstream.v1 import admin_pb2_grpc, engine_control_pb2_grpc
from millstream_client import Client
from millstream_client.errors import from_rpc_error
from millstream_server.cli.admin.calls import AdminCall, IncompleteError
from millstream_server.cli.admin.commands import AdminCommand
from millstream_server.cli.admin.failures import Failure, explain
from millstream_server.cli.admin.output import JsonOutput, Output, TextOutput
from millstream_server.cli.admin.requests import make_calls
from millstream_server.cli.admin.servers import AdminServer, chosen_servers
from millstream_server.cli.client import connect

_FAILED, _WRONG_USAGE, _INTERRUPTED = 1, 2, 130
_AFTER_INTERRUPT = (
    "interrupted: an operation that hasn't begun to change the engine is undone, a later one is "
    "finished; `millstream admin status` shows which"
)


def operate(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    try:
        return asyncio.run(_operate(args))
    except KeyboardInterrupt:
        print(f"\n{_AFTER_INTERRUPT}", file=sys.stderr)
        return _INTERRUPTED


async def _operate(args: argparse.Namespace) -> int:
    async with contextlib.AsyncExitStack() as stack:
        try:
            servers = chosen_servers(args)
            calls = make_calls(args, len(servers))
            clients = [
                await stack.enter_async_context(connect(server.destination)) for server in servers
            ]
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return _WRONG_USAGE
        output: Output = JsonOutput() if args.json else TextOutput(several=len(servers) > 1)
        works = [
            _run(args.admin_command, server, client, call, output)
            for server, client, call in zip(servers, clients, calls, strict=True)
        ]
        done = await asyncio.gather(*works)
    return 0 if all(done) else _FAILED


async def _run(
    command: AdminCommand, server: AdminServer, client: Client, call: AdminCall, output: Output
) -> bool:
    """Call one server; return whether it did as asked."""
    label = server.label
    try:
        response = await call.run(
            _stub(command, client),
            lambda progress: output.progress(label, progress),
            client.metadata(),
        )
    except grpc.aio.AioRpcError as error:
        failure = explain(from_rpc_error(error), server.destination, command.name)
    except (IncompleteError, ValueError) as error:
        failure = Failure("", "", str(error))
    else:
        output.result(label, response, call.describe(response))
        return True
    output.failure(label, failure)
    return False


def _stub(command: AdminCommand, client: Client) -> Any:
    make = (
        engine_control_pb2_grpc.EngineControlServiceStub
        if command.of_workers
        else admin_pb2_grpc.AdminServiceStub
    )
    return make(client.channel)
