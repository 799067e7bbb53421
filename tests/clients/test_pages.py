"""docs/clients: the code that a page shows is that of the example which the tests run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.clients.client_builds import ROOT, need, run

_CLIENTS = Path(__file__).parent
_PAGES = _CLIENTS.parents[1] / "docs" / "clients"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SHOWN = {
    "cpp": {"cpp": "*.cc", "cmake": "CMakeLists.txt"},
    "go": {"go": "**/*.go"},
    "java": {"java": "**/*.java", "xml": "**/pom.xml"},
    "ruby": {"ruby": "example.rb"},
    "rust": {"rust": "**/*.rs", "toml": "Cargo.toml"},
    "typescript": {"ts": "example.ts"},
}
_OTHER = {"sh", "kotlin"}
_WHOLE = {
    "cpp": ["CMakeLists.txt", "ask.cc"],
    "go": ["ask/main.go"],
    "java": ["ask/pom.xml", "ask/src/main/java/Ask.java"],
    "rust": ["Cargo.toml", "build.rs", "src/main.rs"],
}
"""Programs that a page has from the first line to the last; `test_LANGUAGE.py` runs them."""


@pytest.mark.parametrize("language", list(_SHOWN))
def test_a_page_shows_code_that_is_run(language: str) -> None:
    blocks = _BLOCK.findall((_PAGES / f"{language}.md").read_text())
    shown = [(kind, code) for kind, code in blocks if kind not in _OTHER]
    assert {kind for kind, _ in shown} == set(_SHOWN[language])
    for kind, code in shown:
        files = (_CLIENTS / language).glob(_SHOWN[language][kind])
        assert any(code in file.read_text() for file in files), code


@pytest.mark.parametrize("language", list(_WHOLE))
def test_a_page_has_a_whole_program(language: str) -> None:
    blocks = [code for _, code in _BLOCK.findall((_PAGES / f"{language}.md").read_text())]
    for file in _WHOLE[language]:
        assert (_CLIENTS / language / file).read_text() in blocks


def test_the_php_recipe_makes_stubs(tmp_path: Path) -> None:
    need("protoc", "grpc_php_plugin")
    section = (_PAGES / "README.md").read_text().partition("\n## PHP\n")[2]
    (command,) = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    run(["bash", "-ec", command], tmp_path)
    assert (tmp_path / "src/Millstream/V1/ProcessorServiceClient.php").exists()
    assert (tmp_path / "src/Millstream/V1/ChatRequest.php").exists()


def test_the_rust_recipe_keeps_the_well_known_types() -> None:
    """Without them prost-build panics; there are no crates here to build it with."""
    assert '== "google.protobuf"' in (_CLIENTS / "rust" / "build.rs").read_text()
