"""Writes millstream/files/settings.json: the settings that each role's service has, with types.

With it the chart refuses a misspelt setting when it is rendered, and not when a pod starts.
`--check` only compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.app import MediaDiffusionSettings
from millstream_server.diffusion.launch import KindSettings
from millstream_server.diffusion.text import TextDiffusionSettings
from millstream_server.embedding.app import EmbeddingSettings
from millstream_server.encode.app import EncodeSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.settings.show import schema
from millstream_server.worker.settings import WorkerSettings

FILE = Path(__file__).parent / "millstream" / "files" / "settings.json"
ROLES: dict[str, tuple[type[Any], ...]] = {
    "processor": (ProcessorSettings,),
    "encode": (EncodeSettings,),
    "prefill": (WorkerSettings,),
    "decode": (DecodeSettings,),
    "embedding": (EmbeddingSettings,),
    "diffusion": (MediaDiffusionSettings,),
    "diffusion-text": (TextDiffusionSettings, KindSettings),
}


def settings_of(cls: type[Any]) -> dict[str, Any]:
    """Return a type per setting: a list of choices, or a word."""
    return {
        name: kind
        for name, described in schema(cls)["properties"].items()
        if (kind := _kind(described))
    }


def _kind(described: dict[str, Any]) -> Any:
    """Return the type of a setting; None of a section that is no setting itself."""
    ways = described.get("anyOf", [described])
    if "description" not in described and "description" not in ways[0]:
        return None
    if "enum" in ways[0]:
        return ways[0]["enum"]
    kind = ways[0]["type"]
    return kind if isinstance(kind, str) else kind[0]


def text() -> str:
    """Return what the file should hold: a line per setting, for diffs."""
    known = {
        role: {name: kind for cls in classes for name, kind in settings_of(cls).items()}
        for role, classes in ROLES.items()
    }
    roles = []
    for role, kinds in known.items():
        lines = [f"    {json.dumps(name)}: {json.dumps(kinds[name])}" for name in sorted(kinds)]
        roles.append(f"  {json.dumps(role)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(roles) + "\n}\n"


def main() -> int:
    """Write, or check; returns the exit code."""
    if "--check" not in sys.argv:
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(text(), encoding="utf-8")
    elif FILE.read_text(encoding="utf-8") != text():
        sys.stderr.write(f"{FILE} isn't of the services' settings: run `make chart`\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
