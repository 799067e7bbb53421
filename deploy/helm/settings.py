"""Writes lists of all services' settings.

The chart's files/settings.json has them by role, with types: the chart refuses a wrong one when it
is rendered, not when a pod starts. The services' variables.txt has all variables that our programs
read: any other is warned of. `--check` only compares.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from millstream_server.cli.flags import ADDRESS_VARIABLE, ADMIN_KEY_VARIABLE, KEY_VARIABLE
from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.diffusion.worker.launch import KindSettings
from millstream_server.diffusion.worker.text import TextDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime import settings as runtime_settings
from millstream_server.runtime.settings import declared
from millstream_server.runtime.settings.declare import PREFIX, variable
from millstream_server.runtime.settings.show import schema

FILES = Path(__file__).parent / "millstream" / "files"
VARIABLES = Path(runtime_settings.__file__).with_name("variables.txt")
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


def texts() -> dict[Path, str]:
    """Return what the files should hold."""
    return {
        FILES / "settings.json": _settings(),
        VARIABLES: _variables(),
    }


def _variables() -> str:
    classes = [cls for each in ROLES.values() for cls in each]
    names = {variable(f.name) for cls in classes for f in declared(cls)}
    names |= {variable("config"), ADDRESS_VARIABLE, ADMIN_KEY_VARIABLE, KEY_VARIABLE}
    return "".join(f"{name.removeprefix(PREFIX)}\n" for name in sorted(names))


def _settings() -> str:
    """Write the settings of each role: a line per setting, for diffs."""
    roles = []
    for role, classes in ROLES.items():
        found = {name: value for cls in classes for name, value in settings_of(cls).items()}
        lines = [f"    {json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
        roles.append(f"  {json.dumps(role)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(roles) + "\n}\n"


def main() -> int:
    """Write, or check; returns the exit code."""
    for file, text in texts().items():
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{file} isn't of the services' settings: run `make chart`\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
