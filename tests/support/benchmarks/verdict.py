"""How a benchmark that checks points reports: what was measured, and which points don't hold."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Verdict:
    """Filled while a benchmark runs."""

    measured: dict[str, Any] = dataclasses.field(default_factory=dict)
    broken: list[str] = dataclasses.field(default_factory=list)
    """A sentence for each thing that should hold and doesn't."""

    def expect(self, holds: object, otherwise: str) -> None:
        """Note ``otherwise`` unless ``holds``."""
        if not holds:
            self.broken.append(otherwise)

    def conclude(self, *, as_json: bool) -> int:
        """Print the report; answers the exit code: 1 when a point doesn't hold."""
        if as_json:
            print(json.dumps({**self.measured, "broken": self.broken}))  # noqa: T201
        else:
            print("\n".join(_lines(self.measured)))  # noqa: T201
            for sentence in self.broken:
                print(f"BROKEN: {sentence}")  # noqa: T201
            print("all points hold" if not self.broken else "some points don't hold")  # noqa: T201
        return int(bool(self.broken))


def parser_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    """Make a benchmark's parser, with the flags that all of them have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m tests.benchmarks.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--logs", type=Path, help="directory to keep the services' logs in")
    return parser


@contextlib.contextmanager
def folder_for(arguments: argparse.Namespace) -> Iterator[Path]:
    """Give a folder to work in; it goes away unless it was named."""
    if arguments.logs:
        arguments.logs.mkdir(parents=True, exist_ok=True)
        for log in arguments.logs.glob("*.log"):
            log.unlink()
        yield arguments.logs
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def progress(text: str) -> None:
    """Tell people how far it is."""
    sys.stderr.write(text + "\n")


def _lines(value: dict[str, Any], indent: str = "") -> list[str]:
    lines = []
    for name, entry in value.items():
        if isinstance(entry, dict) and any(isinstance(v, dict) for v in entry.values()):
            lines += [f"{indent}{name}:", *_lines(entry, indent + "  ")]
        elif isinstance(entry, dict):
            cells = ", ".join(f"{key} {_plain(v)}" for key, v in entry.items())
            lines.append(f"{indent}{name}: {cells}")
        else:
            lines.append(f"{indent}{name}: {_plain(entry)}")
    return lines


def _plain(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)
