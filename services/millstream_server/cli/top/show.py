"""Refreshes the table until Ctrl-C, or prints it once."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from rich.console import Console
from rich.live import Live

from millstream_server.cli.answers import open_console
from millstream_server.cli.flags import WRONG_USAGE, fail, read_connection, tls_name_of
from millstream_server.cli.suite.running import NoSuiteError, RunningSuite, find_suite
from millstream_server.cli.top.processor import ProcessorRow, Processors
from millstream_server.cli.top.rows import Meter, ModelRow, Reach, Row, model_rows, sort_rows
from millstream_server.cli.top.table import as_object, draw, signs_of
from millstream_server.cli.top.workers import Workers
from millstream_server.routing.discovery.sources import Discovery, StaticDiscovery, make_discovery
from millstream_server.runtime.settings import SettingsError

_SETTLE_TICK_S = 0.02
_FIRST_TABLE_S = 1.0
"""Longest wait before the first table of many; a worker that hangs must not hide the others."""
_LINES_OF_PROCESSORS = 2
_DISCOVERED = re.compile(r"(k8s|dns|file):(?!//)")
_LINES_BESIDE = 6
"""Of the screen: headings, and a line for problems or for what doesn't fit."""

Fronts = Sequence[ProcessorRow]
Print = Callable[[list[Row], list[ModelRow], Fronts], None]


def show(args: argparse.Namespace) -> int:
    """Run the command; return the exit code."""
    logging.basicConfig(level=logging.CRITICAL)  # the table says what is wrong
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        return asyncio.run(_show(args))
    return 0


async def _show(args: argparse.Namespace) -> int:
    try:
        server = read_connection(argparse.Namespace(**{**vars(args), "address": ""}))
        discovery, suite = _discovery(args)
        address = args.address or suite.processor_address
        async with contextlib.AsyncExitStack() as stack:
            name = args.worker_tls_name or server.server_name or tls_name_of(args.workers)
            its = replace(server, server_name=name)
            workers = Workers(discovery, its, args.interval, suite)
            stack.push_async_callback(workers.aclose)
            make = make_discovery if _DISCOVERED.match(address) else StaticDiscovery
            its = replace(server, server_name=server.server_name or tls_name_of(address))
            front = Processors(make(address.split(",") if address else ()), its, args.interval)
            stack.push_async_callback(front.aclose)
            return await (_once if args.once else _forever)(workers, front, args)
    except BrokenPipeError:  # the reader of our output has left
        raise
    except (OSError, ValueError, SettingsError) as error:
        return fail(error, WRONG_USAGE)


def _discovery(args: argparse.Namespace) -> tuple[Discovery, RunningSuite]:
    if not args.workers:
        try:
            suite = find_suite(args.log_dir)
        except NoSuiteError as error:
            raise ValueError(f"{error}; or name workers with --workers") from error
        return StaticDiscovery([worker.address for worker in suite.workers]), suite
    return make_discovery(args.workers.replace(" ", "").split(",")), RunningSuite(())


async def _once(workers: Workers, front: Processors, args: argparse.Namespace) -> int:
    """Wait for what workers tell, measure for an interval, and print."""
    await _settle(workers, front, args.timeout_s)
    meter = Meter()
    states = workers.states()
    meter.rows(states, time.monotonic())
    reached = any(state.reach is Reach.REACHED for state in states)
    if reached:
        await asyncio.sleep(args.interval)
    rows = sort_rows(meter.rows(workers.states(), time.monotonic()), args.sort)
    _printer(args, open_console())(rows, model_rows(rows), front.rows())
    if not rows:
        print("no worker was found", file=sys.stderr)
    return 0 if reached else 1


async def _settle(workers: Workers, front: Processors, timeout_s: float) -> None:
    """Wait until workers have told what they can tell soon, so that no empty table is printed."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not (workers.settled and front.settled):
                workers.states()
                await asyncio.sleep(_SETTLE_TICK_S)


async def _forever(workers: Workers, front: Processors, args: argparse.Namespace) -> int:
    console = open_console()
    meter = Meter()
    with contextlib.ExitStack() as stack:
        if console.is_terminal and not args.json:
            _end_on_sigterm()
            print_ = _live(stack, console)
        else:
            print_ = _printer(args, console)
        await _settle(workers, front, _FIRST_TABLE_S)
        while True:
            rows = sort_rows(meter.rows(workers.states(), time.monotonic()), args.sort)
            print_(rows, model_rows(rows), front.rows())
            await asyncio.sleep(args.interval)


def _live(stack: contextlib.ExitStack, console: Console) -> Print:
    live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
    signs = signs_of(console.encoding)

    def print_(rows: list[Row], models: list[ModelRow], fronts: Fronts) -> None:
        lines = (
            console.height
            - len(models)
            - _LINES_BESIDE
            - (_LINES_OF_PROCESSORS + len(fronts) if fronts else 0)
        )
        fitting, used = 0, 0
        for row in rows:
            used += 1 + (len(row.ranks) if len(row.ranks) > 1 else 0) + bool(row.state.problem)
            fitting += used <= lines
        live.update(
            draw(
                rows,
                models,
                fronts=fronts,
                now_s=time.monotonic(),
                signs=signs,
                max_rows=max(1, fitting),
                width=console.width,
            ),
            refresh=True,
        )

    return print_


def _printer(args: argparse.Namespace, console: Console) -> Print:
    signs = signs_of(console.encoding)

    def print_json(rows: list[Row], models: list[ModelRow], fronts: Fronts) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        print(json.dumps(as_object(rows, models, fronts, now)), flush=True)

    def print_table(rows: list[Row], models: list[ModelRow], fronts: Fronts) -> None:
        width = console.width if console.is_terminal else None
        now_s = time.monotonic()
        console.print(draw(rows, models, fronts=fronts, now_s=now_s, signs=signs, width=width))
        if not args.once:
            console.print()

    return print_json if args.json else print_table


def _end_on_sigterm() -> None:
    """Leave the screen as it was, also when somebody else ends this."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
