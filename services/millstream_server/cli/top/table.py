"""Draws the rows: as tables for a screen or a pipe, or as an object for JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from millstream_server.cli.top.processor import ProcessorRow
from millstream_server.cli.top.rows import ModelRow, Mood, RankRow, Reach, Row

_BAR = 10
_HIGH, _FULL = 0.8, 0.95
"""Shares of KV blocks from which on the bar is yellow, or red."""
_NOTHING = "-"
_COLUMNS = (
    *("worker", "role", "model", "health", "run", "queue", "KV in use", "cached now", "in all"),
    *("tokens/s", "progress", "device", "weights", "adapters"),
)
_LEFT = ("processor", "worker", "role", "model", "health", "KV in use", "device", "weights")
_LEAST_FIRST = (
    *("adapters", "bars", "addresses", "weights", "device", "role", "in all", "cached now"),
)
"""What is left out on a narrow screen; addresses of workers that have a name."""
_GAP = 2
"""Blanks between columns."""


def signs_of(encoding: str) -> str:
    """Return the signs of a full and an empty part of a bar; ASCII where there are no blocks."""
    try:
        "█░".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return "#."
    return "█░"


def draw(
    rows: Sequence[Row],
    models: Sequence[ModelRow],
    *,
    fronts: Sequence[ProcessorRow] = (),
    now_s: float,
    signs: str,
    max_rows: int | None = None,
    width: int | None = None,
) -> Group:
    """Draw the Processors, the workers, what is wrong with them, and the models.

    ``max_rows``: workers at most. ``width``: columns of the screen; what says least is left out
    until the tables fit. None: any number.
    """
    shown = rows[:max_rows]
    parts = _processors(fronts, width) if fronts else []
    parts.append(_table(width, lambda hidden: _workers(shown, signs, hidden)))
    if len(shown) < len(rows):
        parts.append(Text(f"and {len(rows) - len(shown)} more; --once prints all"))
    parts += [Text(line, style="red") for line in _problems(shown, now_s)]
    if models:
        parts += [Text(""), _table(width, lambda hidden: _models(models, signs, hidden))]
    return Group(*parts)


def _processors(fronts: Sequence[ProcessorRow], width: int | None) -> list[Table | Text]:
    lines = [
        _Line(
            {
                "processor": front.address,
                "run": _number(front.running),
                "queue": _number(front.queued),
                "requests/s": _rate(front.requests_per_s),
                "failed/s": _rate(front.failed_per_s),
                "TTFT": _NOTHING if front.ttft_s is None else f"{front.ttft_s * 1000:.0f} ms",
            }
        )
        for front in fronts
    ]
    problems = [f"{front.address}: {front.problem}" for front in fronts if front.problem]
    said = [Text(line, style="red") for line in problems]
    return [_table(width, lambda _: lines), *said, Text("")]


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of a table: cells by the names of their columns."""

    cells: dict[str, str | Text]
    style: str = ""


def _table(width: int | None, make: Callable[[frozenset[str]], list[_Line]]) -> Table:
    """Make a table; leave out so many parts that it fits into ``width`` columns."""
    for count in range(len(_LEAST_FIRST) + 1):
        lines = make(frozenset(_LEAST_FIRST[:count]))
        # The first line has a cell in each column.
        columns = list(lines[0].cells) if lines else list(_COLUMNS)
        if width is None or sum(_width(name, lines) for name in columns) <= width:
            break
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold")
    for name in columns:
        if name == "adapters":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
    for line in lines:
        table.add_row(*(line.cells.get(name, "") for name in columns), style=line.style)
    return table


def _width(name: str, lines: Sequence[_Line]) -> int:
    # Rich's own measuring takes 100 times as long.
    cells = (line.cells.get(name, "") for line in lines)
    texts = (cell.plain if isinstance(cell, Text) else cell for cell in cells)
    return max(cell_len(text) for text in (name, *texts)) + _GAP


def _workers(rows: Sequence[Row], signs: str, hidden: frozenset[str]) -> list[_Line]:
    # Columns without anything in them are left out, so that most tables fit into 100 columns.
    nothing = set()
    if len({row.model for row in rows if row.model}) <= 1:
        nothing.add("model")
    nothing |= {name for name in ("device", "adapters") if not any(getattr(r, name) for r in rows)}
    lines = []
    for row in rows:
        cells = _cells(row, signs, hidden)
        style = "dim" if row.mood is Mood.GONE or row.state.reach is Reach.LOST else ""
        lines.append(
            _Line({name: cells[name] for name in _COLUMNS if name not in hidden | nothing}, style)
        )
        if len(row.ranks) > 1:
            lines += [_Line(_rank_cells(rank, signs, hidden)) for rank in row.ranks]
    return lines


def _cells(row: Row, signs: str, hidden: frozenset[str]) -> dict[str, str | Text]:
    return {
        "worker": row.name if row.name and "addresses" in hidden else row.state.label,
        "role": row.role or _NOTHING,
        "model": row.model or _NOTHING,
        "health": Text(row.health, style=row.mood.value),
        **_load(row, signs, hidden),
        "progress": _progress(row.since_progress_s) if row.ranks else _NOTHING,
        "device": row.device or _NOTHING,
        "weights": row.weight_version or _NOTHING,
        "adapters": ", ".join(row.adapters) or _NOTHING,
    }


def _load(row: Row | ModelRow, signs: str, hidden: frozenset[str]) -> dict[str, str | Text]:
    return {
        "run": _number(row.running),
        "queue": _number(row.queued),
        "KV in use": _kv(row, signs, hidden),
        "cached now": percent(row.hits_now),
        "in all": percent(row.hits),
        "tokens/s": _number(row.tokens_per_s),
    }


def _rank_cells(rank: RankRow, signs: str, hidden: frozenset[str]) -> dict[str, str | Text]:
    return {
        "worker": f"  rank {rank.rank}",
        "health": f"{rank.queued_tokens:,} tokens queued" if rank.queued_tokens else "",
        "run": str(rank.running),
        "queue": str(rank.queued),
        "KV in use": _kv(rank, signs, hidden),
        "progress": _progress(rank.idle_s),
    }


def _models(models: Sequence[ModelRow], signs: str, hidden: frozenset[str]) -> list[_Line]:
    lines = []
    for row in models:
        style = "" if row.serving == row.workers else Mood.PASSING.value
        serving = Text(f"{row.serving} of {row.workers}", style=style)
        lines.append(_Line({"model": row.model, "serving": serving, **_load(row, signs, hidden)}))
    return lines


def _problems(rows: Sequence[Row], now_s: float) -> list[str]:
    return [
        f"{row.state.label}: {row.health} for {now_s - row.state.since_s:.0f} s: {row.problem}"
        for row in rows
        if row.problem and row.state.listed
    ]


def bar(share: float, signs: str) -> str:
    """Return a bar; it is empty at 0 only, and full at 1 only."""
    full = round(share * _BAR)
    full = min(max(full, 1 if share > 0 else 0), _BAR if share >= 1 else _BAR - 1)
    return signs[0] * full + signs[1] * (_BAR - full)


def _number(number: float | None) -> str:
    # Counts as they are, rates without a fraction and with commas.
    if number is None:
        return _NOTHING
    return f"{number:,.0f}" if isinstance(number, float) else str(number)


def _rate(number: float | None) -> str:
    return _NOTHING if number is None else f"{number:,.1f}"


def percent(share: float | None) -> str:
    """Return a share as people read it."""
    return _NOTHING if share is None else f"{share * 100:.0f} %"


def _kv(row: Row | RankRow | ModelRow, signs: str, hidden: frozenset[str]) -> Text | str:
    if not row.total_blocks:
        return _NOTHING
    share = (row.used_blocks or 0) / row.total_blocks
    if "bars" in hidden:
        return percent(share)
    colour = "red" if share >= _FULL else "yellow" if share >= _HIGH else "green"
    return Text.assemble((bar(share, signs), colour), f" {percent(share):>5}")


def _progress(idle_s: float | None) -> str:
    return "idle" if idle_s is None else f"{idle_s:.1f} s ago"


# ---- JSON ----------------------------------------------------------------------------------------


def as_object(
    rows: Sequence[Row], models: Sequence[ModelRow], fronts: Sequence[ProcessorRow], time: str
) -> dict[str, Any]:
    """Return everything as JSON takes it; rates of 0 to 1, times in seconds, null: not known."""
    return {
        "time": time,
        "processor": _fields(fronts[0]) if fronts else None,
        "processors": list(map(_fields, fronts)),
        "workers": [{**_fields(row), "ranks": list(map(_fields, row.ranks))} for row in rows],
        "models": list(map(_fields, models)),
    }


def _fields(row: ProcessorRow | Row | RankRow | ModelRow) -> dict[str, Any]:
    names = [field.name for field in fields(row)]
    if "ranks" in names:  # what follows is for the table
        names = names[: names.index("ranks")]
    return {name: getattr(row, name) for name in names}
