"""Which servers a command calls."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

from millstream_server.cli.connection import Destination, read_admin_key, read_tls
from millstream_server.cli.suite.running import (
    NoSuiteError,
    RunningService,
    RunningSuite,
    find_suite,
)


@dataclass(frozen=True, slots=True)
class AdminServer:
    """A server, and what its lines of output begin with."""

    label: str
    destination: Destination


def chosen_servers(args: argparse.Namespace) -> list[AdminServer]:
    """Return the servers that the flags name.

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
    named = _all(args) if args.all else [_named(args, text) for text in args.admin]
    key_of = _keys(args)
    return [
        AdminServer(label, replace(base, address=address, api_key=key_of(address)))
        for label, address in named
    ]


def _all(args: argparse.Namespace) -> list[tuple[str, str]]:
    suite = _suite(args)
    found = suite.workers if args.admin_command.of_workers else suite.services
    if args.model:
        found = tuple(service for service in found if service.model == args.model)
        if not found:
            models = ", ".join(sorted({worker.model for worker in suite.workers}))
            raise ValueError(f"no worker serves {args.model!r}; the suite has: {models}")
    return [_place(service) for service in found]


def _named(args: argparse.Namespace, text: str) -> tuple[str, str]:
    if ":" in text:
        return text, text
    services = _suite(args).services
    for service in services:
        if service.name == text:
            return _place(service)
    names = ", ".join(service.name for service in services)
    raise ValueError(f"--admin: {text!r} is neither HOST:PORT nor one of the suite's: {names}")


def _keys(args: argparse.Namespace) -> Callable[[str], str]:
    """Return what gives the key of an admin address: that of the suite's run for the suite's."""
    other = read_admin_key()
    try:
        suite = find_suite(args.log_dir)
    except NoSuiteError:
        return lambda _: other
    ports = {service.admin for service in suite.services}
    return lambda address: (
        suite.admin_key if address.replace("localhost:", "127.0.0.1:") in ports else other
    )


def _suite(args: argparse.Namespace) -> RunningSuite:
    try:
        return find_suite(args.log_dir)
    except NoSuiteError as error:
        raise ValueError(str(error)) from error


def _place(service: RunningService) -> tuple[str, str]:
    return service.name, service.admin
