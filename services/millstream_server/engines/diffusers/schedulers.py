"""The schedulers of a pipeline: the model's own, and others of the same kind that work with it.

Others are offered for flow matching only, which Z-Image and Wan do. None of them draws noise of
its own during the steps: that would not come from the request's seed.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millstream_server.runtime.telemetry.log import get_log

log = get_log(__name__)

_FLOW: Mapping[str, Any] = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
_OTHERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "flow_match_euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "unipc": ("UniPCMultistepScheduler", _FLOW),
    "dpm_solver": ("DPMSolverMultistepScheduler", _FLOW),
    "deis": ("DEISMultistepScheduler", _FLOW),
}
_SHIFTS = ("shift", "flow_shift")


class Schedulers:
    """Schedulers by their names in requests, the model's own first."""

    def __init__(self, own: Any) -> None:
        """Make all that can be made with the configuration of the model's own."""
        self._made = {_name(own): own, **_others(own)}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._made)

    def fresh(self, name: str) -> Any:
        """Return one that no run has used: they keep state, and pipelines set attributes."""
        return copy.deepcopy(self._made[name])

    def keep(self, check: Callable[[str], None]) -> None:
        """Drop those for which ``check`` raises; if the model's own fails, raise its error."""
        own, *others = self._made
        check(own)
        kept = works(others, check)
        self._made = {name: self._made[name] for name in (own, *kept)}


def works(names: Iterable[str], check: Callable[[str], None]) -> list[str]:
    """Return the names of the schedulers for which ``check`` doesn't raise."""
    kept = []
    for name in names:
        try:
            check(name)
        except Exception as error:  # noqa: BLE001 - the vendor's seam: anything may come
            log.debug("a scheduler does not work with the model", scheduler=name, error=error)
        else:
            kept.append(name)
    return kept


def _name(own: Any) -> str:
    kind = type(own).__name__
    for name, (known, _) in _OTHERS.items():
        if known == kind:
            return name
    short = re.sub(r"(Multistep|Singlestep|Discrete)?Scheduler$", "", kind)
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", short).lower()


def _others(own: Any) -> dict[str, Any]:
    config = dict(own.config)
    flow = type(own).__name__.startswith("FlowMatch")
    if not flow and config.get("prediction_type") != "flow_prediction":
        return {}
    shift = next((config[key] for key in _SHIFTS if config.get(key)), 1.0)
    config |= dict.fromkeys(_SHIFTS, shift)
    diffusers: Any = importlib.import_module("diffusers")
    made = {}
    for name, (kind, options) in _OTHERS.items():
        if name == _name(own):
            continue
        try:
            made[name] = getattr(diffusers, kind).from_config(config, **options)
        except Exception as error:  # noqa: BLE001 - the vendor's seam: anything may come
            log.debug("a scheduler does not fit the model", scheduler=name, error=error)
    return made
