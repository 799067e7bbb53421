"""What a row came to, and whether it holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.hostile.normal import Chat
from tests.benchmarks.hostile.rows import Row
from tests.support.telemetry.scraping import LoopPieces

MOST_LOG_LINES = 100
MOST_PROBE_S = 1.0
"""For `/livez` after an attack: Kubernetes' own timeout."""
MOST_PIECE_MS, MOST_PIECES_MS = 20.0, 5.0
"""CPU time of one piece of the event loop: of any, and of 99.99 %."""
MOST_LEFT = 1.10
"""Memory half a minute after an attack, as a share of idle."""


def percentile_ms(chats: Sequence[Chat], share: float) -> float:
    """Return a percentile of the chats' times; of few chats p99 is the longest."""
    times = sorted(chat.took_s * 1e3 for chat in chats)
    return times[max(0, math.ceil(len(times) * share) - 1)] if times else math.nan


@dataclass
class Result:
    """Figures of one row."""

    row: Row
    seconds: float
    idle: Sequence[Chat]
    during: Sequence[Chat]
    """Begun during the attack, or in the second after it."""
    idle_mb: float
    peak_mb: float
    processor_cores: float
    worker_cores: float
    report: Mapping[str, Any]
    stopped: bool
    after_mb: float = math.nan
    """Half a minute after the attack."""
    log_lines: int = 0
    log_bytes: int = 0
    forged: int = 0
    probe_s: float = 0.0
    """The longest that a probe took after the attack."""
    pieces: LoopPieces | None = None
    """Of the Processor's event loop, from the attack on."""
    alive: bool = True
    worker_alive: bool = True
    alone: Sequence[Chat] = field(default_factory=list)
    """While the attacker's bytes went to a process that discards them."""

    @property
    def codes(self) -> Counter[str]:
        return Counter(chat.code for chat in self.during)

    @property
    def piece_ms(self) -> float:
        """The edge below which the longest piece was."""
        return self.pieces.within_ms() if self.pieces else math.nan

    def broken(self, idle_p99_ms: tuple[float, float]) -> list[str]:
        """Say each point that doesn't hold; idle is on the standing connection, and on new ones."""
        found = list(self.report["broken"])
        if not any(self.report[name] for name in ("connections", "calls", "answers")):
            found.append("the attacker reached nothing: this row says nothing")
        found += [] if self.alive else ["the Processor ended"]
        found += [] if self.worker_alive else ["the worker ended"]
        late = f"a probe took {self.probe_s:.1f} s after the attack"
        found += [] if self.probe_s <= MOST_PROBE_S else [late]
        held = f"a piece of the loop took up to {self.piece_ms:.0f} ms"
        found += [held] if self.piece_ms > MOST_PIECE_MS else []
        if failed := Counter(f"{c.code} ({c.details})" for c in self.during if c.code != "OK"):
            found.append(
                f"of {len(self.during)} normal chats failed: {dict(failed.most_common(3))}"
            )
        for new, idle_ms in zip((False, True), idle_p99_ms, strict=True):
            most_ms = self.row.times_idle * max(idle_ms, _p99_ms(self.alone, new=new) or 0.0)
            if math.isnan(most_ms):
                most_ms = self.row.times_idle * idle_ms
            p99_ms = _p99_ms(self.during, new=new)
            if not self.row.control and not p99_ms <= most_ms:
                where = " on new connections" if new else ""
                found.append(f"p99{where} {p99_ms:.0f} ms, above {most_ms:.0f}")
        if self.stopped or self.peak_mb - self.idle_mb > self.row.memory_mb:
            cut = "; the attack was ended there" if self.stopped else ""
            found.append(f"memory {self.idle_mb:.0f} -> {self.peak_mb:.0f} MB, more than "
                         f"{self.row.memory_mb:.0f} beyond idle{cut}")  # fmt: skip
        if self.alive and not self.row.control and self.after_mb > MOST_LEFT * self.idle_mb:
            left = self.after_mb / self.idle_mb
            found.append(f"after 30 s {self.after_mb:.0f} MB, {left:.2f} x idle")
        if self.log_lines > MOST_LOG_LINES:
            found.append(f"{self.log_lines} log lines, {self.log_bytes / 1e6:.1f} MB")
        if self.forged:
            found.append(f"{self.forged} forged fields in the log")
        return found

    def as_json(self, idle_p99_ms: tuple[float, float]) -> dict[str, Any]:
        """Return all figures by name."""
        p = percentile_ms
        standing, new = on(self.during, new=False), on(self.during, new=True)
        calls = self.report["calls"]
        return {
            "row": self.row.name,
            "number": self.row.number,
            "seconds": self.seconds,
            "chats": len(self.during),
            "codes": dict(self.codes),
            "idle_ms_p50": p(on(self.idle, new=False), 0.5),
            "idle_ms_p99": p(on(self.idle, new=False), 0.99),
            "during_ms_p50": p(standing, 0.5),
            "during_ms_p99": p(standing, 0.99),
            "new_ms_p50": p(new, 0.5),
            "new_ms_p99": p(new, 0.99),
            "alone_ms_p99": _p99_ms(self.alone, new=False),
            "alone_new_ms_p99": _p99_ms(self.alone, new=True),
            "ms_a_call": 1e3 * self.processor_cores * self.seconds / calls if calls else math.nan,
            "idle_mb": self.idle_mb,
            "peak_mb": self.peak_mb,
            "after_mb": self.after_mb,
            "processor_cores": self.processor_cores,
            "worker_cores": self.worker_cores,
            "probe_s": self.probe_s,
            "piece_ms": self.piece_ms,
            "log_lines": self.log_lines,
            "log_bytes": self.log_bytes,
            "alive": self.alive,
            "attacker": dict(self.report),
            "broken": self.broken(idle_p99_ms),
        }


def on(chats: Sequence[Chat], *, new: bool) -> list[Chat]:
    """Return the chats on new connections, or on the standing one."""
    return [chat for chat in chats if chat.new is new]


def _p99_ms(chats: Sequence[Chat], *, new: bool) -> float:
    return percentile_ms(on(chats, new=new), 0.99)


def failed(row: Row, error: BaseException) -> Result:
    """Make the result of a row that never came to its attack."""
    report = {"broken": [str(error)[-2000:]], "connections": 0, "calls": 0, "answers": {}}
    nothing = math.nan
    report |= {"sent_bytes": 0}
    return Result(
        row, 0.0, [], [], nothing, nothing, nothing, nothing, report=report, stopped=False
    )


_COLUMNS = (
    ("number", "#", "{}"),
    ("row", "row", "{}"),
    ("codes", "normal chats", "{}"),
    ("during_ms_p50", "p50 ms", "{:.0f}"),
    ("during_ms_p99", "p99", "{:.0f}"),
    ("new_ms_p50", "new p50", "{:.0f}"),
    ("new_ms_p99", "p99", "{:.0f}"),
    ("alone_new_ms_p99", "alone new p99", "{:.0f}"),
    ("idle_mb", "idle MB", "{:.0f}"),
    ("peak_mb", "peak", "{:.0f}"),
    ("after_mb", "30 s after", "{:.0f}"),
    ("processor_cores", "cores", "{:.2f}"),
    ("ms_a_call", "ms a call", "{:.2f}"),
    ("probe_s", "probe s", "{:.2f}"),
    ("piece_ms", "loop ms", "{:.0f}"),
    ("log_lines", "log lines", "{:d}"),
)


def table(rows: Sequence[Mapping[str, Any]], idle: Mapping[str, float]) -> str:
    """Lay the rows out for people; what doesn't hold follows below."""
    lines = [[*(title for _, title, _ in _COLUMNS), ""]]
    for row in rows:
        cells = [form.format(_plain(row[name])) for name, _, form in _COLUMNS]
        lines.append([*cells, "BROKEN" if row["broken"] else "holds"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    laid = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    told = [f"BROKEN {row['row']}: {text}" for row in rows for text in row["broken"]]
    held = sum(not row["broken"] for row in rows)
    idle_line = (
        f"idle: p50 {idle['p50']:.0f} ms, p99 {idle['p99']:.0f} ms; on new connections "
        f"p50 {idle['new_p50']:.0f} ms, p99 {idle['new_p99']:.0f} ms"
    )
    return "\n".join([*laid, idle_line, *told, f"{held} of {len(rows)} rows hold"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{count} {code}" for code, count in value.items())
    return value
