"""Typed settings from flags, the environment, a YAML file and defaults; read once at the start.

A component declares its settings as a frozen dataclass with `setting(...)` fields. `load` makes
flags (`--step-s`), variables (`MILLSTREAM_STEP_S`) and keys of the file (`step_s`) of them; a flag
wins over the environment, that over the file, that over the default. A part with settings of its
own, such as an engine adapter, declares them in a dataclass beside its code. The component includes
them as a `group(...)`; their flags, variables and keys are named like its own.
"""

from __future__ import annotations

from millstream_server.runtime.settings.arguments import EngineArguments, ReadArgument
from millstream_server.runtime.settings.declare import SettingsError, declared, group, setting
from millstream_server.runtime.settings.load import load, read_first, unread_variables
from millstream_server.runtime.settings.show import describe, schema

__all__ = [
    "EngineArguments",
    "ReadArgument",
    "SettingsError",
    "declared",
    "describe",
    "group",
    "load",
    "read_first",
    "schema",
    "setting",
    "unread_variables",
]
