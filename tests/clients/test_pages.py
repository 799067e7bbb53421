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
    "java": {"java": "**/*.java", "xml": "**/pom.xml", "kotlin": "**/*.kt"},
    "php": {"php": "ask.php", "json": "composer.json"},
    "ruby": {"ruby": "*.rb"},
    "rust": {"rust": "**/*.rs", "toml": "Cargo.toml"},
    "typescript": {"ts": "*.ts"},
}
_OTHER = {"sh", "gradle"}
_WHOLE = {
    "cpp": ["CMakeLists.txt", "ask.cc"],
    "go": ["ask/main.go"],
    "java": ["ask/pom.xml", "ask/src/main/java/Ask.java", "kotlin/Ask.kt"],
    "php": ["ask.php", "composer.json"],
    "ruby": ["ask.rb"],
    "rust": ["Cargo.toml", "build.rs", "src/main.rs"],
    "typescript": ["ask.ts"],
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


def test_the_tools_page_has_whole_programs() -> None:
    """`test_LANGUAGE.py` runs them."""
    page = (_PAGES.parent / "tools.md").read_text()
    blocks = [code for kind, code in _BLOCK.findall(page) if kind != "sh"]
    files = ("python/tools.py", "go/tools/main.go", "typescript/tools.ts", "java/tools/Tools.java")
    assert blocks == [(_CLIENTS / file).read_text() for file in files]


def test_the_php_page_makes_the_stubs_that_its_program_uses(tmp_path: Path) -> None:
    """There is no gRPC extension here to run it with."""
    need("protoc", "grpc_php_plugin")
    page = (_PAGES / "php.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)composer install\n", page, re.DOTALL)
    (tmp_path / "proto").symlink_to(ROOT / "proto")
    run(["bash", "-ec", commands], tmp_path)
    for name in re.findall(r"^use Millstream\\(.+);$", page, re.MULTILINE):
        assert (tmp_path / "src/Millstream" / f"{name.replace(chr(92), '/')}.php").exists()


def test_the_cpp_pages_packages_need_no_recommended_ones() -> None:
    """Containers install without: cmake only recommends make, protoc the library's headers."""
    need("apt-cache")
    (line,) = re.findall(r"`apt install (.+)`", (_PAGES / "cpp.md").read_text())
    kinds = ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")
    command = ["apt-cache", "depends", "--recurse", *(f"--no-{kind}" for kind in kinds)]
    found = run([*command, *line.split()], ROOT).stdout.splitlines()
    assert {"g++", "make", "libgrpc++-dev", "libprotobuf-dev", "protobuf-compiler"} <= {*found}


def test_the_rust_program_retries_what_a_lost_connection_had_queued() -> None:
    program = (_CLIENTS / "rust/src/main.rs").read_text()
    assert "Code::Unavailable" in program
    assert "Code::Cancelled && std::error::Error::source(status).is_some()" in program
    assert 'var("MILLSTREAM_API_KEY")?' not in program


def test_the_rust_recipe_keeps_the_well_known_types() -> None:
    """Without them prost-build panics; there are no crates here to build it with."""
    assert '== "google.protobuf"' in (_CLIENTS / "rust" / "build.rs").read_text()
