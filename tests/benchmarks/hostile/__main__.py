"""What hostile callers, or such that take too much, do to a normal client's chats and to memory.

    python -m tests.benchmarks.hostile                               # all rows, about ten minutes
    python -m tests.benchmarks.hostile --only silent-streams,ping
    python -m tests.benchmarks.hostile --same-address --json

Each row has a Processor and a worker (simulated engine, steps of 10 ms) of its own, a normal client
that begins two chats every half second, one of them on a new connection, and an attacker, each a
process. The attacker comes from another loopback address than that client; with --same-address
from the same.

Must hold: no normal chat fails; their p99 is at most 5 times that of idle (3 times, where the row
says so), on new connections and apart from them; or of the same attacker when its bytes go to a
process that discards them ("alone": what it costs the machine); the Processor answers probes within
a second when the attacker has closed its connections; it takes no more memory than the row allows
and half a minute later at most 10 % more than before; no piece of its event loop takes more than 20
ms of CPU time, and 99.99 % of those of all rows at most 5 (as its own stall watch says); it writes
at most 100 log lines besides one a turn; it lives. Exit code 1 if a point doesn't.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.benchmarks.hostile.attacker import Order
from tests.benchmarks.hostile.credentials import Files
from tests.benchmarks.hostile.normal import Chat
from tests.benchmarks.hostile.results import (
    MOST_PIECES_MS,
    Result,
    failed,
    on,
    percentile_ms,
    table,
)
from tests.benchmarks.hostile.rows import ROWS, Row
from tests.benchmarks.hostile.trial import Trial, alone, finish_attacker, start_attacker
from tests.support.benchmarks.verdict import folder_for, parser_of, progress
from tests.support.processes import forked
from tests.support.processes.ports import free_port
from tests.support.processes.processes import rss_mb
from tests.support.telemetry.scraping import LoopPieces

_LAST_CHATS_S = 1.0


@dataclass
class Bench:
    """All rows of a run."""

    arguments: argparse.Namespace
    folder: Path
    results: list[tuple[Result, Order]] = field(default_factory=list)
    idle: list[Chat] = field(default_factory=list)
    _recoveries: list[threading.Thread] = field(default_factory=list)

    def run(self, rows: list[Row]) -> None:
        """Attack with all rows; then see what the attackers cost alone."""
        files = Files(self.folder / "files")
        files.make()
        for row in rows:
            self._row(row, files)
            progress(f"{row.name}: {_said(self.results[-1][0])}")
        for thread in self._recoveries:
            thread.join()
        if self.arguments.alone_s:
            self._alone(files)

    def _trial(self, row: Row, files: Files, name: str) -> Trial:
        return Trial(row, self.folder / name, self._source, files)

    @property
    def _source(self) -> str:
        return "127.0.0.1" if self.arguments.same_address else "127.0.0.2"

    def _row(self, row: Row, files: Files) -> None:
        trial = self._trial(row, files, row.name)
        try:
            result, order, ended = self._attacked(trial)
        except BaseException as error:
            trial.stop()
            if not isinstance(error, AssertionError):
                raise
            self.results.append((failed(row, error), trial.order(0.0)))
            return
        self.idle += [chat for chat in result.idle if chat.code == "OK"]
        self.results.append((result, order))
        until = ended + self.arguments.after_s
        recovery = threading.Thread(target=_recover, args=(trial, result, until))
        recovery.start()
        self._recoveries.append(recovery)
        trial.until_quiet()

    def _attacked(self, trial: Trial) -> tuple[Result, Order, float]:
        trial.start()
        with trial.normal() as normal:
            known = len(normal.chats)
            time.sleep(self.arguments.idle_s)
            idle = normal.chats[known:]
            order = trial.order(self.arguments.seconds)
            before = LoopPieces.of(trial.metrics_port)
            seen = trial.attack(order)
            probe_s = trial.probed_s(max(_LAST_CHATS_S, trial.row.after_s))
            pieces = (
                LoopPieces.of(trial.metrics_port).since(before) if trial.processor.alive else None
            )
            normal.finish()
        during = [chat for chat in normal.chats if chat.began >= seen.began]
        result = Result(
            trial.row, seen.ended - seen.began, idle, during, seen.idle_mb, seen.peak_mb,
            seen.processor_cores, seen.worker_cores, asdict(seen.report), seen.stopped,
            probe_s=probe_s, pieces=pieces,
        )  # fmt: skip
        return result, order, seen.ended

    def _alone(self, files: Files) -> None:
        """Run every attack once more against a process that discards, beside a quiet Processor."""
        trial = self._trial(Row(name="alone", attack=""), files, "alone")
        trial.start()
        try:
            with trial.normal() as normal:
                for result, order in self.results:
                    if result.row.control or not result.report["sent_bytes"]:
                        continue
                    began = _discarded(order, result, self.arguments.alone_s)
                    time.sleep(0.3)
                    result.alone = [chat for chat in normal.chats if chat.began >= began]
        finally:
            trial.stop()

    def report(self) -> int:
        """Print; answers the exit code."""
        idle = {
            name + rank: percentile_ms(on(self.idle, new=new), share)
            for name, new in (("", False), ("new_", True))
            for rank, share in (("p50", 0.5), ("p99", 0.99))
        }
        p99_ms = (idle["p99"], idle["new_p99"])
        rows = [result.as_json(p99_ms) for result, _ in self.results]
        pieces_ms = self._pieces_ms()
        if self.arguments.json:
            shown = {"idle_ms": idle, "rows": rows, "pieces_ms_p9999": pieces_ms}
            print(json.dumps(shown))  # noqa: T201
        else:
            print(table(rows, idle))  # noqa: T201
            print(f"pieces of the loop, all rows: p99.99 at most {pieces_ms:.0f} ms")  # noqa: T201
        return int(any(row["broken"] for row in rows) or pieces_ms > MOST_PIECES_MS)

    def _pieces_ms(self) -> float:
        """Return the bound of 99.99 % of the pieces of all rows; one row has too few for it."""
        found = [result.pieces for result, _ in self.results if result.pieces]
        return sum(found[1:], found[0]).within_ms(0.9999) if found else math.nan


def _discarded(order: Order, result: Result, seconds: float) -> float:
    """Attack a process that discards; returns when the attack began."""
    port = free_port()
    discard = subprocess.Popen(
        [sys.executable, "-m", "tests.benchmarks.hostile.discard", str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert discard.stdout is not None
        discard.stdout.readline()
        process = start_attacker(alone(order, result.report, port, seconds))
        return finish_attacker(process, time.monotonic()).began
    finally:
        discard.kill()
        discard.communicate()


def _recover(trial: Trial, result: Result, until: float) -> None:
    """See what is left of an attack at a later time, and stop the services."""
    try:
        while time.monotonic() < until and trial.processor.alive:
            time.sleep(0.25)
        result.alive, result.worker_alive = trial.processor.alive, trial.worker.alive
        if result.alive:
            result.after_mb = rss_mb(trial.processor.pid)
        result.log_lines, result.log_bytes, result.forged = trial.logged()
    finally:
        trial.stop()


def _said(result: Result) -> str:
    times = ", ".join(
        f"{name} p50 {percentile_ms(chats, 0.5):.0f} p99 {percentile_ms(chats, 0.99):.0f} ms"
        for name, new in (("standing", False), ("new", True))
        for chats in (on(result.during, new=new),)
    )
    return (
        f"{dict(result.codes)}, {times}, {result.idle_mb:.0f} -> "
        f"{result.peak_mb:.0f} MB; {result.report['sent_bytes'] / 1e6:.1f} MB sent, "
        f"{result.report['calls']} calls, {result.report['answers']}"
    )


def _rows(names: str) -> list[Row]:
    if unknown := {*names.split(",")} - {*ROWS}:
        message = f"{', '.join(sorted(unknown))}: not one of {', '.join(ROWS)}"
        raise argparse.ArgumentTypeError(message)
    return [ROWS[name] for name in names.split(",")]


def main() -> int:
    """Parse arguments, attack, report."""
    parser = parser_of("hostile", __doc__)
    parser.add_argument("--only", type=_rows, help="rows, comma-separated (all)")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each attack, at least (5)")
    parser.add_argument(
        "--after-s", type=float, default=30.0, help="until memory has to be given back (30)"
    )
    parser.add_argument(
        "--alone-s", type=float, default=3.0, help="of each attack against nobody; 0: none (3)"
    )
    parser.add_argument("--idle-s", type=float, default=2.0, help="before each attack (2)")
    parser.add_argument(
        "--same-address",
        action="store_true",
        help="attackers come from the normal client's address",
    )
    arguments = parser.parse_args()
    with _quick_starts(), folder_for(arguments) as folder:
        bench = Bench(arguments, folder)
        bench.run(arguments.only or [*ROWS.values()])
        return bench.report()


@contextlib.contextmanager
def _quick_starts() -> Iterator[None]:
    """Fork the services, which are many; a test session has a server for that already."""
    if forked.begun("services"):
        yield
        return
    forked.begin("services")
    try:
        yield
    finally:
        forked.end()


if __name__ == "__main__":
    raise SystemExit(main())
