"""What chat templates call reasoning and its effort: a client has one knob, makers many names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream_server.runtime.frozen import dataclass


@dataclass(frozen=True, slots=True)
class Switch:
    """A variable that a chat template may have, and the value for it."""

    name: str
    value: Any
    word: str = ""
    """What the template has to have in quotes for this to be its meaning; empty: nothing."""


Switches = Mapping[str, Sequence[Switch]]
"""By the field that asks for it. The template's first is set; a later field wins."""

_FIRST_EFFORT = "reasoning_effort"
_OFF_WORDS = ("no_think", "none")
"""Efforts that stand for no reasoning, where the template has no switch of its own."""


def reasoning(enabled: tuple[str, bool | None], effort: tuple[str, str | None]) -> Switches:
    """Return what two fields ask for, each with its value; None: it asks for nothing.

    Off wins over an effort, and an effort over on: some templates have one variable for both.
    """
    (on_field, on), (effort_field, level) = enabled, effort
    found = {}
    if on:
        found[on_field] = thinking(on=True)
    if level:
        found[effort_field] = _effort(level)
    if on is False:
        found[on_field] = thinking(on=False)
    return found


def asked_of(switches: Switches) -> tuple[tuple[str, bool | None], tuple[str, str | None]]:
    """Return what `reasoning` made switches of."""
    enabled: tuple[str, bool | None] = ("", None)
    effort: tuple[str, str | None] = ("", None)
    for field, (first, *_) in switches.items():
        if first.name == _FIRST_EFFORT:
            effort = (field, first.value)
        else:
            enabled = (field, first.value)
    return enabled, effort


def thinking(*, on: bool) -> Sequence[Switch]:
    """Return what templates call it, the most common names first."""
    mode = "enabled" if on else "disabled"
    return (
        Switch("enable_thinking", on),
        Switch("thinking", on),
        Switch("thinking_mode", mode, word=mode),
        Switch("thinking_budget", -1 if on else 0),
        *(Switch("reasoning_effort", "high" if on else word, word=word) for word in _OFF_WORDS),
    )


def turns_off(variables: Mapping[str, Any]) -> bool:
    """Return whether a template with these variables asks for no reasoning."""
    offs = thinking(on=False) if variables else ()
    return any((off.name, off.value) in variables.items() for off in offs)


def _effort(level: str) -> Sequence[Switch]:
    return (
        Switch(_FIRST_EFFORT, level),
        Switch("thinking_effort", level),
        Switch("reasoning_strength", level),
        Switch(f"{level}_effort", value=True),
    )
