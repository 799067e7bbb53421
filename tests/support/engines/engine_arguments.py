"""An engine's arguments as its adapter would have read them, without the engine."""

from __future__ import annotations

from millstream_server.runtime.settings import EngineArguments, ReadArgument


def read_as(**values: object) -> EngineArguments:
    """Return arguments given as flags."""
    read = {name: ReadArgument(value, value, "flag") for name, value in values.items()}
    return EngineArguments(read=read)
