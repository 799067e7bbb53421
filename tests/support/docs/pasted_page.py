"""A page of docs/ whose commands are pasted into one shell, in order, and what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.ports import free_port

ROOT = Path(__file__).parents[3]
_ROW = re.compile(r"^(\S+) +127\.0\.0\.1:(\d+) +:(\d+) +:(\d+) ", re.MULTILINE)


@dataclass(frozen=True)
class PastedPage:
    """Its ports are replaced by free ones: those of `up` once it has said what it took."""

    name: str
    ports_of_up: Mapping[str, tuple[str, str, str]]
    """Ports as the page has them: what `up` takes when all are free, by the names in its table."""
    own_ports: tuple[str, ...] = ()
    """Ports that the page's other commands use."""
    limit_s: float = 200.0
    programs: tuple[Path, ...] = ()
    """Folders to find programs in, besides PATH."""

    @property
    def text(self) -> str:
        return (ROOT / "docs" / self.name).read_text(encoding="utf-8")

    def blocks(self) -> list[tuple[str, str]]:
        """Read the page's commands, each with its section's title."""
        found = []
        for section in re.split(r"^## ", self.text, flags=re.MULTILINE)[1:]:
            title = section.partition("\n")[0]
            blocks = re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
            found += [(title, block) for block in blocks]
        return found

    def sections(self) -> list[str]:
        """Return the titles of the sections that have commands."""
        return list(dict.fromkeys(title for title, _ in self.blocks()))

    def run(self, folder: Path, shared: Iterable[str] = ("demo", "proto")) -> dict[str, str]:
        """Run all blocks in one shell; return what each section printed.

        ``folder`` gets links to the repository's ``shared`` folders.
        """
        for name in shared:
            (folder / name).symlink_to(ROOT / name)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MILLSTREAM_", "OTEL_"))
        }
        folders = [Path(sys.executable).parent, *self.programs, os.environ["PATH"]]
        path = os.pathsep.join(map(str, folders))
        with subprocess.Popen(
            ["bash"],
            cwd=folder,
            env={**inherited, "PATH": path, "OTEL_BSP_SCHEDULE_DELAY": "100"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as shell:
            end = threading.Timer(self.limit_s, os.killpg, (shell.pid, signal.SIGKILL))
            end.start()
            try:
                return self._printed(shell, folder)
            finally:
                end.cancel()
                os.killpg(shell.pid, signal.SIGKILL)

    def _printed(self, shell: subprocess.Popen[str], folder: Path) -> dict[str, str]:
        assert shell.stdin is not None
        assert shell.stdout is not None
        own_ports = {port: str(free_port()) for port in self.own_ports}
        printed: dict[str, str] = {}
        for number, (title, block) in enumerate(self.blocks()):
            script = folder / f"block-{number}.sh"
            script.write_text(_with_ports(block, {**own_ports, **self._taken_by_up(folder)}))
            # A file, so that no command reads the next one as its input.
            shell.stdin.write(f"source {script} < /dev/null\necho end-of-block-{number}\n")
            shell.stdin.flush()
            printed.setdefault(title, "")
            while (line := shell.stdout.readline()) != f"end-of-block-{number}\n":
                assert line, f"no end after {printed[title]}"
                printed[title] += line
        return printed

    def _taken_by_up(self, folder: Path) -> dict[str, str]:
        """Read the table that the last `up` printed."""
        tables = sorted(folder.glob(".millstream/*.txt"), key=lambda file: file.stat().st_mtime)
        rows = [row for file in tables for row in _ROW.finditer(file.read_text(encoding="utf-8"))]
        return {
            default: actual
            for row in rows
            for default, actual in zip(self.ports_of_up[row[1]], row.groups()[1:], strict=True)
        }


def _with_ports(block: str, ports: Mapping[str, str]) -> str:
    return re.sub(r"(?<=:)\d{4,5}\b", lambda match: ports.get(match[0], match[0]), block)


def expect_in_order(printed: str, patterns: Sequence[str]) -> None:
    """Find each pattern after the one before; and no sign of a command that broke."""
    rest = printed
    for pattern in patterns:
        match = re.search(pattern, rest, re.MULTILINE)
        assert match, f"no {pattern} in {rest}"
        rest = rest[match.end() :]
    assert "Traceback" not in printed
    assert "command not found" not in printed
