"""`millstream up`: the whole suite on one machine, each service its own process."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from millstream_server.cli import machine
from millstream_server.cli.answers import open_console
from millstream_server.cli.flags import fail
from millstream_server.cli.suite.display import explain_start, print_event, print_ready, progress
from millstream_server.cli.suite.launching import Launcher
from millstream_server.cli.suite.models import (
    FurtherModel,
    PlanError,
    Task,
    choose_further,
    choose_model,
)
from millstream_server.cli.suite.plan import (
    PlannedService,
    PortClaims,
    SuitePlan,
    UpOptions,
    make_plan,
)
from millstream_server.cli.suite.processes import Child, StartError, Suite
from millstream_server.cli.suite.running import announced
from millstream_server.engines.torch_on_cpu import gpu_present
from millstream_server.routing.policy import PolicyName
from millstream_server.runtime.lifecycle.python import wrong_python
from millstream_server.runtime.settings import unread_variables

CommandOf = Callable[[PlannedService], list[str]]


def run(args: argparse.Namespace) -> int:
    """Start, watch until Ctrl-C or SIGTERM, drain; return the exit code."""
    if why := wrong_python():
        return fail(why)
    if lacking := machine.services_lack():
        recipe = "pip install 'millstream[cli,processor]'"
        return fail(f"the services need {', '.join(lacking)}: {recipe}")
    try:
        options = up_options(args)
        with _locked(options.log_dir), PortClaims() as ports:
            gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
            plan = make_plan(options, ports, gpus)
            return asyncio.run(up(plan, plan.command))
    except PlanError as error:
        return fail(error)


def up_options(args: argparse.Namespace) -> UpOptions:
    """Make options of the flags.

    Raises:
        PlanError: there is no such model.
    """
    encode = args.encode or (1 if args.multimodal or args.all else 0)
    model, name = choose_model(args.model, args.model_name, multimodal=encode > 0)
    same = ("topology", "engine", "prefill", "decode", "port", "log_dir", "engine_args")
    return UpOptions(
        model=model,
        model_name=name,
        encode=encode,
        # As in URLs, since a port follows.
        host=f"[{args.host}]" if args.host.count(":") > 1 and args.host[0] != "[" else args.host,
        policy=PolicyName(args.policy),
        further=_further(args),
        **{flag: getattr(args, flag) for flag in same},
    )


def _further(args: argparse.Namespace) -> tuple[FurtherModel, ...]:
    given: dict[Task, Path | None] = {
        Task.IMAGE: args.image_model,
        Task.TEXT_DIFFUSION: args.dllm_model,
        Task.EMBEDDING: args.embedding_model,
        Task.RERANK: args.rerank_model,
    }
    chosen = [
        choose_further(task, path) for task, path in given.items() if path is not None or args.all
    ]
    return tuple(replace(model, image_engine=args.image_engine) for model in chosen)


@contextlib.contextmanager
def _locked(log_dir: Path) -> Iterator[None]:
    """Lock the log directory: two suites must not write to the same files."""
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        lock = (log_dir / "up.lock").open("w")
    except OSError as error:
        raise PlanError(
            f"can't write logs to {log_dir} ({error.strerror}); give --log-dir"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PlanError(
                f"another `millstream up` uses {log_dir}; stop it, or give another --log-dir"
            ) from None
        yield


async def up(plan: SuitePlan, command: CommandOf) -> int:
    """Run a plan's services; ``command`` returns a service's command line."""
    console = open_console()
    if unread := unread_variables():
        print_event(console, f"variables that no program reads: {', '.join(unread)}")
    for worker in plan.workers:  # of an earlier run: this one begins with the model's own weights
        plan.weights_record(worker).unlink(missing_ok=True)
    admin_key = secrets.token_hex(32)
    with (
        _stop_signals() as (stop, force),
        announced(plan, admin_key),
        Launcher(plan.options.log_dir) as launcher,
    ):
        children = _children(plan, command, admin_key, launcher)
        suite = Suite(children, lambda text: print_event(console, text))
        try:
            return await _serve(console, plan, suite, stop, force)
        finally:
            await suite.abandon()


async def _serve(
    console: Console, plan: SuitePlan, suite: Suite, stop: asyncio.Event, force: asyncio.Event
) -> int:
    """Start, watch, drain. After a failed or interrupted start processes are still running."""
    began_s = time.monotonic()
    try:
        with progress(console) as show:
            started = await _unless(stop, suite.start(show))
    except StartError as error:
        explain_start(console, error.child)
        return 1
    if not started:
        print_event(console, "stopping before all services were ready")
        return 1
    print_ready(console, plan, suite.children, time.monotonic() - began_s)
    await _unless(stop, suite.watch())
    clean = await suite.drain(force)
    print_event(console, "stopped" if clean else "stopped; not everything ended by itself")
    return 0 if clean else 1


def _children(
    plan: SuitePlan, command: CommandOf, admin_key: str, launcher: Launcher
) -> list[Child]:
    # Passed on to the children unchanged.
    env = dict(os.environ)
    # Their admin ports are open to this machine: without a key every user of it could operate them.
    env["MILLSTREAM_ADMIN_KEYS"] = f"up:sha256:{hashlib.sha256(admin_key.encode()).hexdigest()}"
    env["MILLSTREAM_TICKET_KEY"] = secrets.token_hex(32)
    env["PYTHONUNBUFFERED"] = "1"
    # Engines on the CPU share its cores; by default each would start a thread per core.
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // len(plan.services))))
    if not gpu_present():  # PyTorch's CUDA build would refuse `auto`
        env.setdefault("MILLSTREAM_DEVICE", "cpu")
    return [
        Child(
            service,
            command(service),
            env if service.gpu is None else {"CUDA_VISIBLE_DEVICES": str(service.gpu), **env},
            plan.options.log_dir / f"{service.name}.log",
            partial(launcher.start, plan.preload(service)),
        )
        for service in plan.services
    ]


@contextlib.contextmanager
def _stop_signals() -> Iterator[tuple[asyncio.Event, asyncio.Event]]:
    """Turn Ctrl-C and SIGTERM into events: the first means stop, the second kill."""
    stop, force = asyncio.Event(), asyncio.Event()

    def asked() -> None:
        (force if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    try:
        yield stop, force
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run ``work`` until it ends or ``stop`` is set; return whether it ended by itself."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)
