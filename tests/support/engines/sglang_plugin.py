"""Our SGLang plugin `scheduling/on_path`, imported without SGLang."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from millstream_server.engines.sglang import launch

PLUGIN = Path(launch._SCHEDULING) / "millstream_sglang_scheduling_plugin.py"


@pytest.fixture(name="plugin")
def imported_plugin(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import it with stand-ins of what it imports."""
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    vars(registry).update(HookRegistry=None, HookType=None)
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    spec = importlib.util.spec_from_file_location("scheduling_plugin", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
