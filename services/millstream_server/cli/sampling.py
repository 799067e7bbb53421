"""Sampling flags of chat and complete, and their conversion to the client's keywords."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from millstream_client.knobs import KNOBS, Knob, Knobs

_TEXTS = {
    "adapter": "a LoRA adapter that the model's workers have loaded (millstream models lists them)",
    "session": "requests with the same TEXT go to the same worker, whose cache has their beginning",
    "cache_salt": "requests with another TEXT, or none, don't share this one's cache",
}


def whole_number(most: int, least: int = 0) -> Callable[[str], int]:
    """Make an argparse type that refuses values out of range."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            message = f"{text!r} is not a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each sampling knob, and for stop texts."""
    group = parser.add_argument_group("sampling", "left out: the model's own defaults")
    for knob in KNOBS:
        flag = "--" + knob.name.replace("_", "-")
        group.add_argument(flag, dest=knob.name, help=knob.help, **_parsing(knob))
    group.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end the answer at this text; may be repeated",
    )
    group = parser.add_argument_group("routing and caches")
    for name, sentence in _TEXTS.items():
        group.add_argument("--" + name.replace("_", "-"), metavar="TEXT", help=sentence)


def _parsing(knob: Knob) -> dict[str, Any]:
    if knob.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    action = "append" if knob.repeated else "store"
    if knob.kind is float:
        return {"action": action, "type": float, "metavar": "X"}
    return {"action": action, "type": whole_number(knob.largest), "metavar": "N"}


def knobs_given(args: argparse.Namespace) -> Knobs:
    """Return the knobs whose flags were given."""
    names = [*(knob.name for knob in KNOBS), "stop", *_TEXTS]
    given: Any = {name: value for name in names if (value := getattr(args, name)) is not None}
    knobs: Knobs = given
    return knobs
