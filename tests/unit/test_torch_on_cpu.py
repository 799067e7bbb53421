"""torchvision beside a CPU build of PyTorch: operators are declared where it brings none."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from millstream_server.engines.torch_on_cpu import declare_torchvision_operators


@pytest.mark.parametrize(
    ("compiled", "declared"),
    [("for CPU", []), ("for CUDA", ["nms", "qnms"]), (None, ["nms", "qnms"])],
)
def test_operators_are_declared_where_the_compiled_part_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str | None, declared: list[str]
) -> None:
    """PyTorch refuses a second declaration, and that ends the import of a build that fits."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("")
    if compiled:
        (tmp_path / "torchvision" / "_C.so").write_text(compiled)
    monkeypatch.syspath_prepend(tmp_path)
    found: list[str] = []

    def load_library(file: Path) -> None:
        if "CUDA" in file.read_text():
            raise OSError("libtorch_cuda.so: cannot open shared object file")

    torch = SimpleNamespace(
        version=SimpleNamespace(cuda=None),
        ops=SimpleNamespace(load_library=load_library),
        library=SimpleNamespace(
            Library=lambda *_: SimpleNamespace(
                define=lambda schema: found.append(schema.partition("(")[0])
            )
        ),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)
    declare_torchvision_operators.__wrapped__()
    assert found == declared
