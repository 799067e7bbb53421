"""The flags of a generation: sampling, structured output, routing."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millstream_client import Constraint
from millstream_client.knobs import KNOBS, Knob, Knobs
from millstream_server.cli.flags import flag, flags, whole_number

_TEXTS = {
    "adapter": "a LoRA adapter that the model's workers have loaded (millstream models lists them)",
    "session": "requests with the same TEXT go to the same worker, whose cache has their beginning",
    "cache_salt": "requests with another TEXT, or none, don't share this one's cache",
}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling knob, and for stop texts."""
    group = parser.add_argument_group("sampling", "left out: the model's own defaults")
    for knob in KNOBS:
        name = "--" + knob.name.replace("_", "-")
        group.add_argument(name, help=knob.help, **_parsing(knob))
    flag(group, "--stop TEXT", "end the answer at this text; may be repeated", action="append")
    _add_constraints(parser)
    group = parser.add_argument_group("routing and caches")
    flags(group, {f"--{name.replace('_', '-')} TEXT": what for name, what in _TEXTS.items()})


def _add_constraints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "structured output", "what the answer must look like; see docs/structured-output.md"
    ).add_mutually_exclusive_group()
    constraints: dict[str, tuple[str, Callable[[str], Constraint]]] = {
        "--json-schema FILE": (
            "JSON that fits this JSON Schema: a file, or the schema itself",
            lambda text: Constraint(json_schema=text if text.startswith("{") else _read(text)),
        ),
        "--regex PATTERN": (
            "a text that this regular expression matches as a whole",
            lambda text: Constraint(regex=text),
        ),
        "--grammar FILE": (
            "a text of this grammar, a file in EBNF whose first rule is `root`",
            lambda text: Constraint(ebnf=_read(text)),
        ),
    }
    for usage, (help_, parse) in constraints.items():
        flag(group, usage, help_, dest="constraint", type=parse)


def _read(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"can't read {file}: {error}") from error


def _parsing(knob: Knob) -> dict[str, Any]:
    if knob.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    action = "append" if knob.repeated else "store"
    if knob.kind is float:
        return {"action": action, "type": float, "metavar": "X"}
    return {"action": action, "type": whole_number(knob.largest), "metavar": "N"}


def knobs_given(args: argparse.Namespace) -> Knobs:
    """Return the knobs whose flags were given."""
    names = [*(knob.name for knob in KNOBS), "stop", "constraint", *_TEXTS]
    given: Any = {name: value for name in names if (value := getattr(args, name)) is not None}
    knobs: Knobs = given
    return knobs
