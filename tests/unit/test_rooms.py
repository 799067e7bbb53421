"""No two rooms of the server import each other, and only engines import what runs models.

A room is a folder of `services/millstream_server`, of `runtime`, or of an ability (its worker's
part apart from its types). Imports for types count, and so do those inside functions.
"""

from __future__ import annotations

import ast
import graphlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SERVICES = Path(__file__).parents[2] / "services"
SERVER = SERVICES / "millstream_server"
DIVIDED = {"runtime", "embedding", "encode", "diffusion", "generation"}
"""Folders whose folders are rooms."""
VENDORS = {"sglang", "torch", "diffusers", "vllm"}

Graph = dict[str, set[str]]


def _room(path: Path) -> str:
    """Return a module's room; nobody imports a `__main__`, so it may import of any room."""
    inside = path.relative_to(SERVER)
    if inside.name == "__main__.py" or len(inside.parts) == 1:
        return str(inside.with_suffix(""))
    depth = 2 if inside.parts[0] in DIVIDED else 1
    return "/".join(inside.parts[:-1][:depth])


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a file imports; of "from a import b" both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant))


def _module(name: str) -> Path | None:
    path = SERVICES.joinpath(*name.split("."))
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def _rooms() -> Graph:
    graph: Graph = defaultdict(set)
    for path in SERVER.rglob("*.py"):
        own = _room(path)
        for name in _imports(path):
            found = _module(name) if name.startswith("millstream_server.") else None
            if found is not None and _room(found) != own:
                graph[own].add(_room(found))
    return graph


def _check(graph: Graph) -> None:
    graphlib.TopologicalSorter(graph).prepare()


def test_no_two_rooms_import_each_other() -> None:
    graph = _rooms()
    assert graph["processor"] >= {"links", "routing", "runtime/rpc"}
    _check(graph)


def test_a_circle_is_found() -> None:
    with pytest.raises(graphlib.CycleError):
        _check(_rooms() | {"routing": {"processor"}})


def test_only_engines_import_what_runs_models() -> None:
    found = {
        str(path.relative_to(SERVER))
        for path in SERVER.rglob("*.py")
        for name in _imports(path)
        if name.partition(".")[0] in VENDORS
    }
    assert found
    assert {name for name in found if not name.startswith("engines/")} == set()
