"""Writes the tables of values into the chart's README.md; with `--check`, only compares them.

A value's row is made of the comment above it that begins with `--`, its path and its default.
`-- .NAME.uri text` in that comment is a row of its own, of a value below it that has no default. A
comment that begins with `==` begins a section; any other comment above a value is a paragraph.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parent / "millstream"
BEGIN, END = "<!-- values: made by deploy/helm/readme.py -->\n", "<!-- end of values -->\n"
_INDENT = 2


@dataclass
class Section:
    """A heading, and below it the paragraphs and rows in their order."""

    title: str
    lines: list[str] = field(default_factory=list)

    def add_row(self, path: str, default: str, text: str) -> None:
        """Add a value to the table, or begin one."""
        if not self.lines or not self.lines[-1].startswith("|"):
            self.lines += ["", "| value | default | meaning |", "|---|---|---|"]
        escaped = text.strip().replace("|", "\\|")
        self.lines.append(f"| `{path}` | {default} | {escaped} |")

    def text(self) -> str:
        """Write it as Markdown."""
        return "\n".join([f"### {self.title}", *self.lines, "", ""])


def sections(text: str) -> list[Section]:
    """Read the comments of a values file."""
    values = yaml.safe_load(text)
    found: list[Section] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        words = line.strip()
        if words.startswith("# =="):
            found.append(Section(words.removeprefix("# ==").strip()))
        elif words.startswith("#"):
            comment.append(words.removeprefix("#").removeprefix(" "))
        elif words and not words.startswith("- "):
            depth = (len(line) - len(line.lstrip())) // _INDENT
            path = [*path[:depth], words.partition(":")[0]]
            if comment and found:
                _take(found[-1], path, comment, values)
        if not words.startswith("#"):
            comment = []
    return found


def _take(section: Section, path: list[str], comment: list[str], values: Any) -> None:
    dotted = ".".join(path)
    if not comment[0].startswith("--"):
        section.lines += ["", f"**`{dotted}`** " + " ".join(comment)]
        return
    for key in path:
        values = values[key]
    for entry in " ".join(comment).split("-- ")[1:]:
        if entry.startswith("."):
            name, _, text = entry.partition(" ")
            section.add_row(dotted + name, "", text)
        else:
            default = "" if values in ("", None) else f"`{json.dumps(values)}`"
            section.add_row(dotted, default, entry)


def updated(readme: str, values: str) -> str:
    """Return the README with the tables for ``values``."""
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "".join(section.text() for section in sections(values))
    return f"{before}{BEGIN}\n{tables}{END}{after}"


def main() -> int:
    """Write, or check; returns the exit code."""
    target = CHART / "README.md"
    old = target.read_text(encoding="utf-8")
    new = updated(old, (CHART / "values.yaml").read_text(encoding="utf-8"))
    if "--check" not in sys.argv:
        target.write_text(new, encoding="utf-8")
    elif new != old:
        sys.stderr.write(f"{target} isn't of values.yaml: run `python {sys.argv[0]}`\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
