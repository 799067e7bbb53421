"""Make the stubs of other languages, or check them: `make gen-clients`, `make gen-clients-check`.

Each language has a buf template beside this file, generators of a fixed version, and a folder that
holds generated files only. The check generates into a temporary folder and compares. A language
whose generators aren't here is skipped with the reason, unless MILLSTREAM_CLIENTS=required (in CI).
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import descriptors

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(__file__).resolve().parent
_SHOWN = 10
_GENERATED = re.compile(r"@javax\.annotation\.Generated\(.*?\)\n", re.DOTALL)


@dataclass(frozen=True)
class Tool:
    """A generator, and the version whose output is committed."""

    command: tuple[str, ...]
    """Prints its version; run in the repository's root."""
    version: str
    """What the output of `command` must contain."""

    def missing(self) -> str:
        """Say why it can't be used; empty if it can."""
        name = self.command[0]
        try:
            found = subprocess.run(
                self.command, capture_output=True, text=True, check=True, cwd=ROOT
            )
        except (OSError, subprocess.CalledProcessError):
            return f"{name} is missing or doesn't run"
        said = (found.stdout + found.stderr).strip()
        return "" if self.version in said else f"{name} is {said!r}, not {self.version}"


def _debian(package: str, version: str) -> Tool:
    return Tool(
        ("dpkg-query", "-W", "-f", "${Package} ${Version}", package), f"{package} {version}"
    )


def _without_annotations(folder: Path) -> None:
    """Take grpc-java's `@Generated` out: javax.annotation isn't in today's JDK nor in jakarta's."""
    for path in folder.rglob("*Grpc.java"):
        text = path.read_text()
        path.write_text(
            re.sub(r"@javax\.annotation\.Generated\(.*?\)\n", "", text, flags=re.DOTALL)
        )


def _buf(language: str) -> Callable[[Path], None]:
    def generate(out: Path) -> None:
        template = TOOLS / f"{language}.gen.yaml"
        subprocess.run(["buf", "generate", "--template", template, "-o", out], check=True, cwd=ROOT)  # noqa: S607

    return generate


def _with_service_configs(folder: Path) -> None:
    """Add the service configs as text: grpc-js takes one as a channel option."""
    configs = ROOT / "services" / "millstream_client" / "service_config"
    lines = ["// Made from services/millstream_client/service_config. DO NOT EDIT."]
    for name, what in (
        ("recommended", "For several Processors: balancing, health and retries."),
        ("one_server", "For a single one: retries."),
    ):
        text = json.dumps(json.loads((configs / f"{name}.json").read_text()))
        constant = "recommendedServiceConfig" if name == "recommended" else "oneServerServiceConfig"
        lines += [f"/** {what} */", f"export const {constant} =\n  {text!r};"]
    (folder / "service_config.ts").write_text("\n".join(lines) + "\n")


def _nothing(_: Path) -> None:
    """Leave the output as it is."""


@dataclass(frozen=True)
class Language:
    """How one language's stubs are made."""

    folder: str
    """Holds nothing but generated files; it is replaced."""
    generate: Callable[[Path], None]
    """Writes them below another root."""
    tools: Sequence[Tool] = ()
    finish: Callable[[Path], None] = field(default=_nothing)
    """Changes the new folder."""

    def missing(self) -> str:
        """Say why its generators can't run; empty if they can."""
        return "; ".join(filter(None, (tool.missing() for tool in self.tools)))


_TS_PROTO = "require('./generated/typescript/node_modules/ts-proto/package.json').version"
_PROTOC = Tool(("protoc", "--version"), "libprotoc 3.21.12")
LANGUAGES = {
    "descriptors": Language("generated/descriptors", descriptors.write),
    "go": Language(
        "generated/go/millstream",
        _buf("go"),
        (
            Tool(("protoc-gen-go", "--version"), "v1.28.1"),
            Tool(("protoc-gen-go-grpc", "--version"), "protoc-gen-go-grpc 1.0"),
        ),
    ),
    "java": Language(
        "generated/java/src/main/java",
        _buf("java"),
        (_PROTOC, _debian("protobuf-compiler-grpc-java-plugin", "1.41.3")),
        _without_annotations,
    ),
    "typescript": Language(
        "generated/typescript/src/gen",
        _buf("typescript"),
        (Tool(("node", "-p", _TS_PROTO), "2.18.0"),),
        _with_service_configs,
    ),
}


def differences(made: Path, committed: Path) -> list[str]:
    """List the files that differ between two folders, or are in one only."""
    files = {
        path.relative_to(root).as_posix(): path
        for root in (made, committed)
        for path in root.rglob("*")
        if path.is_file()
    }
    found = []
    for name in sorted(files):
        if not (committed / name).is_file():
            found.append(f"{name} is missing")
        elif not (made / name).is_file():
            found.append(f"{name} isn't generated")
        elif not filecmp.cmp(made / name, committed / name, shallow=False):
            found.append(f"{name} differs")
    return found


def _run(name: str, *, check: bool) -> list[str]:
    """Replace a language's folder, or list what a check found."""
    language = LANGUAGES[name]
    committed = ROOT / language.folder
    with tempfile.TemporaryDirectory() as temporary:
        language.generate(Path(temporary))
        made = Path(temporary, language.folder)
        language.finish(made)
        if check:
            return [f"{language.folder}/{found}" for found in differences(made, committed)]
        shutil.rmtree(committed, ignore_errors=True)
        shutil.copytree(made, committed)
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through the languages; 1 if one is stale, or was skipped where it had to be made."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, change nothing")
    parser.add_argument("languages", nargs="*", help=", ".join(LANGUAGES))
    options = parser.parse_args(arguments)
    must_run = not options.check or os.environ.get("MILLSTREAM_CLIENTS") == "required"
    failed = False
    for name in options.languages or LANGUAGES:
        if why := LANGUAGES[name].missing():
            print(f"gen-clients: SKIPPED {name}: {why} (make setup-clients)", file=sys.stderr)
            failed |= must_run
            continue
        if found := _run(name, check=options.check):
            failed = True
            print(f"gen-clients: {name} isn't what `make gen-clients` makes:", file=sys.stderr)
            print(*found[:_SHOWN], f"({len(found)} in all)", sep="\n  ", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
