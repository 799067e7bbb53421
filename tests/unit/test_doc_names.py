"""Names of code and paths in the pages exist: a page that names what is gone misleads its reader.

What counts is in backticks, outside of blocks:

- a path whose first folder is one of ours, or that ends in `.py`: such a file or folder is there;
- `Class.name`, where a class or a message of the contract is called so: it has that attribute;
- other names that can only be code's, as `snake_case`, `CamelCase`, `dotted.name` and `called()`:
  the word is in the sources.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PAGES = ("docs/", "services/", "tests/", "deploy/", "requirements/")
_PAST = ("docs/adr/", "CHANGELOG.md")
"""They tell what was."""
_OF_OTHERS = ("docs/agents.md", "docs/clients/", "docs/coming-from.md", "docs/metrics.md")
"""Full of the names of other languages, products and exporters; only classes and paths count."""
_KUBERNETES = frozenset({"ImagePullBackOff"})
_SOURCES = ("services", "proto", "tests", "deploy", "requirements", "pyproject.toml", "Makefile")
_PACKAGE = "services/millstream_server"

_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w.*{},-]+(?:/[\w.*{},-]+)*/?")
_NAME = re.compile(r"([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\(\))?")
_WORD = re.compile(r"[A-Za-z_]\w*")
_ONLY_CODE = re.compile(r"[a-z]\w*_\w+|[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+")


@cache
def _files() -> tuple[str, ...]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


@cache
def _places() -> frozenset[str]:
    """Name every file and folder by each end of its path: `b/c.py` is one of `a/b/c.py`."""
    found = {*_files()} | {str(up) for name in _files() for up in Path(name).parents}
    return frozenset("/".join(Path(name).parts[i:]) for name in found for i in range(9))


@cache
def _folders() -> frozenset[str]:
    """Name the folders in which our paths begin."""
    ours = [name.removeprefix(f"{_PACKAGE}/") for name in _files() if name.startswith(_PACKAGE)]
    return frozenset(name.split("/")[0] for name in (*_files(), *ours) if "/" in name)


@cache
def _attributes() -> Mapping[str, frozenset[str]]:
    """Attributes of classes and of the contract's messages, enums and services, by their names."""
    own, bases = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name in _files():
        if name.startswith("services/") and name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    own[node.name].update(_of_class(node))
                    bases[node.name].update(map(_base, node.bases))
        elif name.startswith("proto/") and name.endswith(".proto"):
            for kind, body in _blocks((ROOT / name).read_text("utf-8")):
                own[kind].update(_WORD.findall(body))
    return {name: frozenset(_inherited(name, own, bases)) for name in own}


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield inner.name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Attribute(attr=name):
                yield name
            case ast.Assign(targets=targets):
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def _base(node: ast.expr) -> str:
    return ast.unparse(node).partition("[")[0].rpartition(".")[2]


def _inherited(
    name: str, own: Mapping[str, set[str]], bases: Mapping[str, set[str]]
) -> Iterator[str]:
    seen, waiting = set[str](), [name]
    while waiting:
        kind = waiting.pop()
        if kind not in seen:
            seen.add(kind)
            yield from own.get(kind, ())
            waiting += bases.get(kind, ())


def _blocks(proto: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each message, enum and service."""
    text = re.sub(r"//.*", "", proto)
    for start in re.finditer(r"\b(?:message|enum|service) (\w+) \{", text):
        end, depth = start.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield start[1], text[start.end() : end]


@cache
def _words() -> frozenset[str]:
    found: set[str] = set()
    for name in _files():
        # Not this file: below it names what isn't there.
        if name.startswith(_SOURCES) and not name.endswith((".md", ".lock", Path(__file__).name)):
            found.update(_WORD.findall((ROOT / name).read_text("utf-8", errors="ignore")))
    return frozenset(found)


def _missing(text: str, *, of_others: bool = False) -> Iterator[str]:
    """Yield the names in a page's text that lead nowhere."""
    for token in _CODE.findall(_BLOCK.sub("", text)):
        if _PATH.fullmatch(token) and (
            token.endswith(".py") or ("/" in token and token.partition("/")[0] in _folders())
        ):
            if not all(map(_is_place, _alternatives(token.rstrip("/")))):
                yield token
        elif found := _NAME.fullmatch(token):
            name, called = found.groups()
            first, _, rest = name.partition(".")
            if rest and first in _attributes():
                known = rest.partition(".")[0] in _attributes()[first]
            elif of_others or name in _KUBERNETES:
                known = True
            elif rest or called or _ONLY_CODE.fullmatch(name):
                known = _is_place(name) or all(map(_is_word, name.split(".")))
            else:
                known = True
            if not known:
                yield token


def _alternatives(path: str) -> list[str]:
    """Spell out `a/{b,c}.py`."""
    if not (braces := re.search(r"\{([^}]*)\}", path)):
        return [path]
    return [path.replace(braces[0], one) for one in braces[1].split(",")]


def _is_place(path: str) -> bool:
    return path in _places() or ("*" in path and bool(fnmatch.filter(_places(), path)))


def _is_word(name: str) -> bool:
    # Prometheus counters are declared without the ending.
    return name in _words() or name.removesuffix("_total") in _words()


def _pages() -> list[str]:
    return [
        name
        for name in _files()
        if name.endswith(".md")
        and (name.startswith(_PAGES) or "/" not in name)
        and not name.startswith(_PAST)
    ]


def test_every_name_in_the_pages_exists() -> None:
    pages = _pages()
    assert {"README.md", "CONTRIBUTING.md", "docs/operations.md"} <= set(pages)
    gone = {}
    for page in pages:
        text = (ROOT / page).read_text("utf-8")
        if found := sorted(set(_missing(text, of_others=page.startswith(_OF_OTHERS)))):
            gone[page] = found
    assert gone == {}


@pytest.mark.parametrize(
    ("there", "gone"),
    [
        ("Router.plan", "Router.pool"),
        ("Server._layers", "Server._interceptor"),
        ("Server.died", "Server.lived"),
        ("UnsupportedFeatureError.of", "UnsupportedFeatureError.off"),
        ("ChatRequest.start", "ChatRequest.begin"),
        ("ProcessorService.Chat", "ProcessorService.Chatter"),
        ("runtime/rpc/limits.py", "runtime/rpc/waiter.py"),
        ("server.py", "waiter.py"),
        ("docs/{metrics,install}.md", "docs/{metrics,gone}.md"),
        ("engines/*/adapter.py", "engines/*/waiter.py"),
        ("until_signal", "until_signals_gone"),
        ("is_loopback()", "is_waiter()"),
        ("RpcInterceptor", "RpcWaiter"),
        ("runtime.errors", "runtime.waiters"),
        ("OVERLOADED", None),
        ("google/rpc/status.proto", None),
        ("--listen", None),
    ],
)
def test_a_name_that_is_gone_is_found(there: str, gone: str | None) -> None:
    assert list(_missing(f"`{there}`")) == []
    assert list(_missing(f"`{gone}`")) == ([gone] if gone else [])


def test_blocks_of_code_are_left_out() -> None:
    assert list(_missing("```\n`until_signals_gone`\n```\n")) == []
