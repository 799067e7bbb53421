"""What `millstream up` shows: the progress of a start, the suite's table, commands to try."""

from __future__ import annotations

import base64
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from millstream_server.cli.flags import DEFAULT_ADDRESS, DEFAULT_LOG_DIR
from millstream_server.cli.suite.models import FurtherModel, Task, demo_picture
from millstream_server.cli.suite.plan import SuitePlan
from millstream_server.cli.suite.processes import Child

_BUF_FLAGS = "--http2-prior-knowledge --reflect-protocol grpc-v1 --protocol grpc"
_SERVICES = "millstream.v1"
_START = '{"slot":1,"token_ids":[7,41,12],"sampling":{"temperature":0,"max_new_tokens":8}}'
_RED_CIRCLE = (
    "iVBORw0KGgoAAAANSUhEUgAAAEAAAABAAQMAAACQp+OdAAAABlBMVEX////cKCi5uRl6AAAAaElEQVR42mNgoC/g/w"
    "Bl/P8PoZn//z8AZrD///8AzJD///8HmGH///8fMKP+//9/UE1QbTAGI4jRADEGYhCcwQ5iPMDP4AcxPlDOIMYuTBfC"
    "HY/pL4SX4YEADxZ4QMGDDh6YiOClFwAAeDafr46s090AAAAASUVORK5CYII="
)
"""A PNG of 64 x 64 pixels: a red circle on white."""

_STEPS: tuple[tuple[str, ...], ...] = (
    ("starting",),
    ("loading the", "reading the models"),
    ("warming up", "waiting for workers"),
)
"""How the phases of a start begin, of workers and of the Processor; a bar has as many steps."""
_BAR_CHARS = 12

Show = Callable[[Sequence[Child]], None]
"""Shows each process's current phase."""


@contextlib.contextmanager
def progress(console: Console) -> Iterator[Show]:
    """Show the processes while they start: lines that change, or one per change in a file."""
    if not console.is_terminal:
        shown: dict[Child, str] = {}
        yield lambda children: _print_changes(console, children, shown)
        return
    spinner = Spinner("dots")
    served_s: dict[Child, float] = {}
    with Live(console=console, refresh_per_second=10) as live:
        yield lambda children: live.update(_grid(children, spinner, served_s))


def _grid(children: Sequence[Child], spinner: Spinner, served_s: dict[Child, float]) -> Table:
    """Return a line per process: its mark, name, bar, phase, seconds until it served."""
    grid = Table.grid(padding=(0, 2))
    for child in children:
        now = time.monotonic()
        mark: Spinner | Text = Text("✗", style="red") if child.ended else spinner
        if child.serving:
            now = served_s.setdefault(child, now)
            mark = Text("✓", style="green")
        phase = Text("serving" if child.serving else child.phase)
        bar = ProgressBar(total=len(_STEPS), completed=_steps_done(child), width=_BAR_CHARS)
        grid.add_row(mark, child.service.name, bar, phase, f"{now - child.started_s:.0f} s")
    return grid


def _steps_done(child: Child) -> int:
    if child.serving:
        return len(_STEPS)
    return next((i for i, begun in enumerate(_STEPS) if child.phase.startswith(begun)), 0)


def _print_changes(console: Console, children: Sequence[Child], shown: dict[Child, str]) -> None:
    for child in children:
        phase = "serving" if child.serving else child.phase
        if shown.get(child) != phase:
            shown[child] = phase
            seconds = time.monotonic() - child.started_s
            line = f"{child.service.name}: {phase} ({seconds:.0f} s)"
            console.print(line, markup=False, soft_wrap=True)


def examples(plan: SuitePlan) -> list[str]:
    """Return commands to paste into another terminal."""
    address = plan.processor.client_address
    where = "" if address == DEFAULT_ADDRESS else f" --address {address}"
    millstream = _tool("millstream")
    if plan.options.encode:
        picture = demo_picture()
        file = shlex.quote(_typed(picture)) if picture is not None else "PICTURE.png"
        once = f'"What is in this picture?" --image {file}'
        content = f'{{"image":{{"data":"{_RED_CIRCLE}"}}}},{{"text":"What is in this picture?"}}'
    else:
        once, content = '"What is Millstream?"', '{"text":"What is Millstream?"}'
    chat = f'{{"messages":[{{"role":"CHAT_ROLE_USER","content":[{content}]}}]}}'
    lines = [
        f"{millstream} chat {once}{where}",
        f"{millstream} chat{where}",
        *(_further(further, millstream, where) for further in plan.options.further),
        _curl(address, "ProcessorService/Chat", chat),
    ]
    if (encode := plan.first("encode")) is not None:
        size = len(base64.b64decode(_RED_CIRCLE))
        item = (
            f'{{"slot":1,"modality":"MODALITY_IMAGE","total_bytes":{size},"data":"{_RED_CIRCLE}"}}'
        )
        lines.append(_curl(encode.address, "EncodeService/Encode", item))
        grpcurl = f"grpcurl -plaintext -d '{{\"start\":{item}}}' {encode.address}"
        lines.append(f"{grpcurl} {_SERVICES}.EncodeService/Encode")
    decode = plan.first("decode")
    if decode is not None and plan.options.topology == "aggregated":  # else it needs a ticket
        lines.append(_curl(decode.address, "DecodeService/Decode", _START))
    return lines


def operating(plan: SuitePlan) -> list[str]:
    """Return commands that watch and operate the suite."""
    millstream, log_dir = _tool("millstream"), plan.options.log_dir
    at = "" if log_dir == DEFAULT_LOG_DIR else f" --log-dir {shlex.quote(str(log_dir))}"
    return [f"{millstream} top{at}", f"{millstream} admin status --all{at}"]


def _further(model: FurtherModel, millstream: str, where: str) -> str:
    match model.task:
        case Task.IMAGE:
            words = '"a red circle on a white background" -o circle.png'
            return f"{millstream} image {words}{where}"
        case Task.TEXT_DIFFUSION:
            return f'{millstream} chat "What is prefill?"{where} --model {model.name}'
        case Task.EMBEDDING:
            return f'{millstream} embed --compare "a cat" "a kitten" "a database"{where}'
        case _:
            documents = '"Mix flour and water, then bake." "A GPU has many cores."'
            return f'{millstream} rerank "How do I bake bread?" {documents}{where}'


def _curl(address: str, method: str, start: str) -> str:
    data = f'{{"start":{start}}}'
    return f"{_tool('buf')} curl {_BUF_FLAGS} -d '{data}' http://{address}/{_SERVICES}.{method}"


def _tool(name: str) -> str:
    tool = Path(sys.executable).parent / name
    return name if "VIRTUAL_ENV" in os.environ or not tool.exists() else _typed(tool)


def _typed(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def print_event(console: Console, text: str) -> None:
    """Print a line with the time."""
    console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, soft_wrap=True)


def explain_start(console: Console, child: Child) -> None:
    """Print why a suite doesn't start."""
    lines = [f"{child.service.name} {child.ending()} while it was {child.phase}"]
    lines += ["", *(f"  {line}" for line in child.tail()), ""]
    lines += [
        f"all of its log: {child.log}",
        "to find out what this machine lacks: millstream doctor",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)


def print_ready(
    console: Console, plan: SuitePlan, children: Sequence[Child], took_s: float
) -> None:
    """Print the suite's table, and commands for another terminal."""
    # Without borders, so that the default suite's table fits into 80 columns.
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("service", "address", "metrics", "admin", "pid", "engine, model"):
        table.add_column(title, no_wrap=True)
    table.add_column("log", overflow="fold")
    for child in children:
        further = child.service.further
        engine = {"processor": "", "encode": "vision tower, "}.get(
            child.service.role,
            f"{further.engine(plan.options.engine) if further else plan.options.engine}, ",
        )
        model = further.name if further else plan.options.model_name
        table.add_row(
            child.service.name,
            child.service.address,
            f":{child.service.metrics_port}",
            f":{child.service.admin_port}",
            str(child.pid),
            f"{engine}{model}",
            str(child.log),
        )
    console.print()
    console.print(table)
    console.print(f"\nReady after {took_s:.1f} s. In another terminal:\n", markup=False)
    _print_commands(console, examples(plan))
    console.print(f"\nIn a browser: http://{plan.processor.client_address}/", markup=False)
    console.print("\nTo watch and operate it:\n", markup=False)
    _print_commands(console, operating(plan))
    images = [m.engine(plan.options.engine) for m in plan.options.further if m.task is Task.IMAGE]
    if "sglang" in images:
        console.print("\nSGLang's image engine listens on all interfaces, too (docs/security.md).")
    console.print("\nCtrl-C stops the suite.", markup=False)


def _print_commands(console: Console, lines: list[str]) -> None:
    console.print("\n".join(f"  {line}" for line in lines), markup=False, soft_wrap=True)
