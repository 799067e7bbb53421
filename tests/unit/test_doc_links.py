"""Links between the pages of the repository lead to files and headings that are there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def _pages() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@cache
def _anchors(page: Path) -> frozenset[str]:
    """Name a page's headings as GitHub does."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in _HEADING.findall(text))
    return frozenset(
        re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles
    )


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page into the repository that lead nowhere."""
    for link in _LINK.findall(_CODE.sub("", page.read_text("utf-8"))):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (heading and heading not in _anchors(target)):
            yield f"{page.name}: {link}"


def test_every_link_leads_somewhere() -> None:
    pages = _pages()
    assert ROOT / "README.md" in pages
    assert [link for page in pages for link in broken_links(page)] == []


@pytest.mark.parametrize("link", ["gone.md", "other.md#gone", "#gone"])
def test_a_broken_link_is_found(tmp_path: Path, link: str) -> None:
    (tmp_path / "other.md").write_text("# There\n")
    page = tmp_path / "page.md"
    page.write_text(f"# `Here`, and there\n[x](other.md#there) [y](#here-and-there) [z]({link})\n")
    assert list(broken_links(page)) == [f"page.md: {link}"]
