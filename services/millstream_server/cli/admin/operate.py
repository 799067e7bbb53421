"""Chooses the servers of a command, and calls all at the same time."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from dataclasses import replace
from typing import Any

import grpc

from millstream.v1 import admin_pb2_grpc, engine_control_pb2_grpc
from millstream_client import Client
from millstream_client.errors import from_rpc_error
from millstream_server.cli.admin.output import Failure, JsonOutput, Output, TextOutput, explain
from millstream_server.cli.admin.requests import AdminCall, IncompleteError, make_calls
from millstream_server.cli.admin.results import describe
from millstream_server.cli.client import connect
from millstream_server.cli.flags import (
    INTERRUPTED,
    WRONG_USAGE,
    Destination,
    fail,
    read_admin_key,
    read_tls,
    tls_name_of,
)
from millstream_server.cli.suite.running import NoSuiteError, RunningSuite, find_suite
from millstream_server.routing.discovery.sources import make_discovery
from millstream_server.runtime.settings import SettingsError

_FAILED = 1
_AFTER_INTERRUPT = (
    "interrupted: an operation that hasn't begun to change the engine is undone, a later one is "
    "finished; `millstream admin status` shows which"
)
_DISCOVERY_S = 10.0


async def _servers(args: argparse.Namespace) -> list[tuple[str, Destination]]:
    """Return the servers that the flags name, each with what its lines of output begin with.

    Raises:
        ValueError: they name none, a suite that doesn't run, or a file that can't be used.
    """
    if bool(args.admin) == args.all:
        raise ValueError(
            "name the admin address of each server, --admin HOST:PORT, or give --all for the suite "
            "that `millstream up` runs here"
            if not args.all
            else "give either --admin or --all"
        )
    if args.model and not args.all:
        raise ValueError("--model chooses among the workers of --all; --admin needs none")
    base = read_tls(argparse.Namespace(**{**vars(args), "address": ""}))
    other = read_admin_key()
    if args.workers:
        if args.admin or args.model:
            raise ValueError("--workers is for --all, without --model")
        name = base.server_name or tls_name_of(args.workers)
        base = replace(base, server_name=name, api_key=other)
        return [(each, replace(base, address=each)) for each in await _discovered(args)]
    try:
        suite = find_suite(args.log_dir)
    except NoSuiteError:
        if args.all or not all(":" in text for text in args.admin):
            raise
        suite = RunningSuite(())
    named = _all(args, suite) if args.all else [_named(suite, text) for text in args.admin]
    key_of = {service.admin: suite.admin_key for service in suite.services}
    servers = []
    for label, address in named:
        key = key_of.get(address.replace("localhost:", "127.0.0.1:"), other)
        servers.append((label, replace(base, address=address, api_key=key)))
    return servers


async def _discovered(args: argparse.Namespace) -> list[str]:
    """Return the admin addresses of the workers that discovery names first."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCOVERY_S):
            async for found in make_discovery(args.workers.split(",")).watch():
                if found:
                    return [f"{one.rpartition(':')[0]}:{args.admin_port}" for one in sorted(found)]
    raise ValueError(f"--workers: none was found within {_DISCOVERY_S:.0f} s")


def _all(args: argparse.Namespace, suite: RunningSuite) -> list[tuple[str, str]]:
    found = suite.workers if args.admin_command.of_workers else suite.services
    if args.model:
        found = tuple(service for service in found if service.model == args.model)
        if not found:
            models = ", ".join(sorted({worker.model for worker in suite.workers}))
            raise ValueError(f"no worker serves {args.model!r}; the suite has: {models}")
    return [(service.name, service.admin) for service in found]


def _named(suite: RunningSuite, text: str) -> tuple[str, str]:
    if ":" in text:
        return text, text
    addresses = {service.name: service.admin for service in suite.services}
    if text not in addresses:
        names = ", ".join(addresses)
        raise ValueError(f"--admin: {text!r} is neither HOST:PORT nor one of the suite's: {names}")
    return text, addresses[text]


def operate(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    try:
        return asyncio.run(_operate(args))
    except KeyboardInterrupt:
        print(f"\n{_AFTER_INTERRUPT}", file=sys.stderr)
        return INTERRUPTED


async def _operate(args: argparse.Namespace) -> int:
    async with contextlib.AsyncExitStack() as stack:
        try:
            servers = await _servers(args)
            calls = make_calls(args, len(servers))
            clients = [await stack.enter_async_context(connect(server)) for _, server in servers]
        except (OSError, ValueError, SettingsError) as error:
            return fail(error, WRONG_USAGE)
        output: Output = JsonOutput() if args.json else TextOutput(several=len(servers) > 1)
        works = [
            _run(args, server, client, call, output)
            for server, client, call in zip(servers, clients, calls, strict=True)
        ]
        done = await asyncio.gather(*works)
    return 0 if all(done) else _FAILED


async def _run(
    args: argparse.Namespace,
    named: tuple[str, Destination],
    client: Client,
    call: AdminCall,
    output: Output,
) -> bool:
    """Call one server; return whether it did as asked."""
    command, (label, server) = args.admin_command, named
    stub: Any = (
        engine_control_pb2_grpc.EngineControlServiceStub
        if command.of_workers
        else admin_pb2_grpc.AdminServiceStub
    )
    try:
        response = await call.run(
            stub(client.channel),
            lambda progress: output.progress(label, progress),
            client.metadata(),
        )
    except grpc.aio.AioRpcError as error:
        failure = explain(from_rpc_error(error), server, command.name)
    except (IncompleteError, ValueError) as error:
        failure = Failure("", "", str(error))
    else:
        output.result(label, response, describe(args, response))
        return True
    output.failure(label, failure)
    return False
