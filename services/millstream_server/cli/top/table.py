"""Draws the rows: as tables for a screen or a pipe, or as an object for JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from millstream_server.cli.top.rows import ModelRow, Mood, RankRow, Row
from millstream_server.cli.top.state import Reach

_BAR = 10
_HIGH, _FULL = 0.8, 0.95
"""Shares of KV blocks from which on the bar is yellow, or red."""
_NOTHING = "-"


@dataclass(frozen=True, slots=True)
class Signs:
    """What the output can show."""

    full: str
    empty: str

    @classmethod
    def of(cls, encoding: str) -> Signs:
        """Return blocks, or ASCII where there are none."""
        try:
            "█░".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return cls("#", ".")
        return cls("█", "░")


def draw(
    rows: Sequence[Row],
    models: Sequence[ModelRow],
    *,
    now_s: float,
    signs: Signs,
    max_rows: int | None = None,
) -> Group:
    """Draw the workers, what is wrong with them, and the models; ``max_rows`` workers at most."""
    shown = rows[:max_rows]
    parts: list[Table | Text] = [_workers(shown, signs)]
    if len(shown) < len(rows):
        parts.append(Text(f"and {len(rows) - len(shown)} more; --once prints all"))
    parts += [Text(line, style="red") for line in _problems(shown, now_s)]
    if models:
        parts += [Text(""), _models(models, signs)]
    return Group(*parts)


def _workers(rows: Sequence[Row], signs: Signs) -> Table:
    # Columns without anything in them are left out, so that most tables fit into 100 columns.
    several = len({row.model for row in rows if row.model}) > 1
    adapters = any(row.adapters for row in rows)
    table = _table()
    table.add_column("worker", no_wrap=True)
    table.add_column("role", no_wrap=True)
    if several:
        table.add_column("model", no_wrap=True)
    table.add_column("health", no_wrap=True)
    for title in ("run", "queue"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("KV in use", no_wrap=True)
    for title in ("cached now", "in all", "tokens/s", "progress"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("weights", no_wrap=True)
    if adapters:
        table.add_column("adapters", overflow="fold")
    for row in rows:
        cells = _cells(row, signs)
        cells[2:2] = [row.model or _NOTHING] if several else []
        cells += [", ".join(row.adapters) or _NOTHING] if adapters else []
        style = "dim" if row.mood is Mood.GONE or row.state.reach is Reach.LOST else ""
        table.add_row(*cells, style=style)
        for rank in row.ranks if len(row.ranks) > 1 else ():
            cells = _rank_cells(rank, signs)
            cells[2:2] = [""] if several else []
            table.add_row(*cells)
    return table


def _cells(row: Row, signs: Signs) -> list[str | Text]:
    load = row.load
    rates = (row.now.counts if row.now else None, row.total)
    return [
        row.state.label,
        row.role or _NOTHING,
        Text(row.status, style=row.mood.value),
        str(load.running_requests) if load else _NOTHING,
        str(load.queued_requests) if load else _NOTHING,
        _kv(load.used_blocks, load.total_blocks, signs) if load else _NOTHING,
        *(percent(counts.hit_rate if counts else None) for counts in rates),
        f"{row.now.tokens_per_s:,.0f}" if row.now else _NOTHING,
        _progress(row.idle_s) if row.ranks else _NOTHING,
        row.weight_version or _NOTHING,
    ]


def _rank_cells(rank: RankRow, signs: Signs) -> list[str | Text]:
    queued = f"{rank.queued_tokens:,} tokens queued" if rank.queued_tokens else ""
    return [
        f"  rank {rank.rank}",
        "",
        queued,
        str(rank.running),
        str(rank.queued),
        _kv(rank.used_blocks, rank.total_blocks, signs),
        *("", "", ""),
        _progress(rank.idle_s),
    ]


def _models(models: Sequence[ModelRow], signs: Signs) -> Table:
    table = _table()
    table.add_column("model", no_wrap=True)
    for title in ("serving", "run", "queue"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("KV in use", no_wrap=True)
    for title in ("cached now", "in all", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in models:
        table.add_row(
            row.model,
            Text(
                f"{row.serving} of {row.workers}",
                style="" if row.serving == row.workers else Mood.PASSING.value,
            ),
            str(row.running),
            str(row.queued),
            _kv(row.used_blocks, row.total_blocks, signs),
            percent(row.hits_now),
            percent(row.hits),
            f"{row.tokens_per_s:,.0f}" if row.tokens_per_s is not None else _NOTHING,
        )
    return table


def _table() -> Table:
    return Table(box=None, padding=(0, 2, 0, 0), header_style="bold")


def _problems(rows: Sequence[Row], now_s: float) -> list[str]:
    return [
        f"{row.state.label}: {row.status} for {now_s - row.state.since_s:.0f} s: "
        f"{row.state.problem}"
        for row in rows
        if row.state.problem and row.state.listed
    ]


def bar(share: float, signs: Signs) -> str:
    """Return a bar; it is empty at 0 only, and full at 1 only."""
    full = round(share * _BAR)
    full = min(max(full, 1 if share > 0 else 0), _BAR if share >= 1 else _BAR - 1)
    return signs.full * full + signs.empty * (_BAR - full)


def percent(share: float | None) -> str:
    """Return a share as people read it."""
    return _NOTHING if share is None else f"{share * 100:.0f} %"


def _kv(used: int, total: int, signs: Signs) -> Text | str:
    if not total:
        return _NOTHING
    share = used / total
    colour = "red" if share >= _FULL else "yellow" if share >= _HIGH else "green"
    return Text.assemble((bar(share, signs), colour), f" {percent(share):>5}")


def _progress(idle_s: float | None) -> str:
    return "idle" if idle_s is None else f"{idle_s:.1f} s ago"


# ---- JSON ----------------------------------------------------------------------------------------


def as_object(rows: Sequence[Row], models: Sequence[ModelRow], time: str) -> dict[str, Any]:
    """Return everything as JSON takes it; rates of 0 to 1, times in seconds, null: not known."""
    return {
        "time": time,
        "workers": [_worker_object(row) for row in rows],
        "models": [
            {name: getattr(row, name) for name in ModelRow.__dataclass_fields__} for row in models
        ],
    }


def _worker_object(row: Row) -> dict[str, Any]:
    state, load = row.state, row.load
    return {
        "address": state.address,
        "name": state.name,
        "worker_id": state.info.worker_id if state.info else "",
        "role": row.role,
        "model": row.model,
        "health": row.status,
        "problem": state.problem,
        "running": load.running_requests if load else None,
        "queued": load.queued_requests if load else None,
        "used_blocks": load.used_blocks if load else None,
        "total_blocks": load.total_blocks if load else None,
        "hits_now": row.now.counts.hit_rate if row.now else None,
        "hits": row.total.hit_rate if row.total else None,
        "tokens_per_s": row.now.tokens_per_s if row.now else None,
        "since_progress_s": row.idle_s,
        "weight_version": row.weight_version,
        "adapters": list(row.adapters),
        "ranks": [
            {name: getattr(rank, name) for name in RankRow.__dataclass_fields__}
            for rank in row.ranks
        ],
    }
