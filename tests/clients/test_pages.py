"""docs/clients: the code that a page shows is that of the example which the tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

_CLIENTS = Path(__file__).parent
_PAGES = _CLIENTS.parents[1] / "docs" / "clients"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN = {
    "cpp": {"cpp": "example.cc", "cmake": "CMakeLists.txt"},
    "go": {"go": "*.go"},
    "java": {"java": "*.java"},
    "ruby": {"ruby": "example.rb"},
    "rust": {"rust": "**/*.rs", "toml": "Cargo.toml"},
    "typescript": {"ts": "example.ts"},
}
_OTHER = {"sh", "xml"}


@pytest.mark.parametrize("language", list(_SHOWN))
def test_a_page_shows_code_that_is_run(language: str) -> None:
    blocks = _BLOCK.findall((_PAGES / f"{language}.md").read_text())
    shown = [(kind, code) for kind, code in blocks if kind not in _OTHER]
    assert {kind for kind, _ in shown} == set(_SHOWN[language])
    for kind, code in shown:
        files = (_CLIENTS / language).glob(_SHOWN[language][kind])
        assert any(code in file.read_text() for file in files), code


def test_the_rust_page_has_the_whole_program() -> None:
    text = (_PAGES / "rust.md").read_text()
    for file in ("Cargo.toml", "build.rs", "src/main.rs"):
        assert f"\n{(_CLIENTS / 'rust' / file).read_text()}```" in text
    # prost-build panics without the well-known types that our messages have.
    assert '== "google.protobuf"' in text
