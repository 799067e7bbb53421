"""README.md and docs/client.md as a new user follows them, on plain `up` and on `up --all`.

Every command and every snippet is run on both, with simulated engines: it works, or says what to
start instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import re
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from millstream_client import MillstreamError
from tests.support.docs.pasted_page import ROOT
from tests.support.processes.command_line import Outcome, millstream, suite_up

pytestmark = pytest.mark.timeout(240)

_NO_IMAGES = r"takes no image .*; `make up ARGS=--multimodal` starts one that does"
_ABOUT = 'chat "What is in this picture?" --image demo/vision/pictures/'
_STARTS_ONE = "no model here {}; `make up ARGS=--all` starts one"


@dataclass(frozen=True)
class Shown:
    """What a page's command or snippet prints on `up --all`, and on plain `up` if that differs."""

    everywhere: str = ""
    plain: str = ""
    """What it fails with there; empty: it works there too."""
    flags: tuple[str, ...] = field(default=())
    """What a test gives besides, so that it ends."""


_COMMANDS = {
    'chat "What is Millstream?"': Shown(r"\S"),
    "chat": Shown(),
    'complete "Millstream is"': Shown(r"\S"),
    "models": Shown(r"demo.* yes .*chat, complete"),
    "top": Shown(r"TTFT\n(.|\n)*\nprocessor|processor(.|\n)*worker", flags=("--once",)),
    "admin status --all": Shown(r"^decode-1: .*in service"),
    "doctor": Shown(r"^ok    Python"),
    f"{_ABOUT}red-circle.png": Shown(r"\S", _NO_IMAGES),
    f"{_ABOUT}blue-square-and-yellow-star.png": Shown(r"\S", _NO_IMAGES),
    'image "a red circle on a white background" --seed 7 -o circle.png': Shown(
        r"^circle\.png \(seed 7\)", _STARTS_ONE.format("makes images")
    ),
    'embed --compare "a cat" "a kitten" "a database"': Shown(
        r"1  a cat +1\.00", _STARTS_ONE.format("embeds texts")
    ),
    'rerank "How do I bake bread?" "Mix flour and water, then bake." "A GPU has many cores."': (
        Shown(r"Mix flour", _STARTS_ONE.format("ranks documents"))
    ),
    'chat --model demo-dllm "What is prefill?"': Shown(
        r"\S", r"'demo-dllm' is not served here; `millstream models` names those that are"
    ),
}
"""Every command of README.md that is for a running suite."""

_SNIPPETS = {
    "client.chat": Shown(r"\d+ \+ \d+ tokens"),
    "Be short.": Shown(r"\S"),
    "client.conversation": Shown("5 messages"),
    "run.answers[0].tool_calls": Shown(r"\S"),
    "for event in run": Shown(r"\S"),
    "client.parse": Shown(r"\d+ prompt tokens\n(.|\n)*\S"),
    "image=picture": Shown("prompt tokens are the image", "takes no image now"),
    "Image(picture)": Shown(r"\S", "takes no image now"),
    "generate_image": Shown("circle.png made with seed 7", "no model here makes images"),
    "client.embed": Shown(r"3 vectors of \d+ numbers(.|\n)*flour", "no model here embeds texts"),
    "InvalidRequestError": Shown("start.options.sampling.top_p must be"),
    "client.models": Shown(r"healthy: True\n(.|\n)*demo.* True(.|\n)*tokens of .*Millstream"),
    "dns:///": Shown(),
}
"""A word of each snippet of docs/client.md, in its order."""


def _blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _readme_commands() -> list[str]:
    """Return what follows `millstream` in README.md, without comments."""
    shown = re.findall(
        r"^(?:\$ )?\.venv/bin/millstream (.*?)(?: +#.*)?$",
        "".join(_blocks("README.md", "(?:sh|console)")),
        re.MULTILINE,
    )
    return [command for command in shown if command.split()[0] != "up"]


async def _run(shown: Shown, command: str, folder: Path) -> Outcome:
    return await millstream(*shlex.split(command), *shown.flags, cwd=folder)


def _said_by(code: str) -> str:
    """Run a snippet; return what it printed, or why it failed."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, "docs/client.md", "exec"), {"__name__": "__main__"})  # noqa: S102
    except MillstreamError as error:
        return f"{out.getvalue()}failed: {error}"
    return out.getvalue()


async def follow_the_pages(folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str) -> list[str]:
    """Follow them on a suite that `up` starts with ``flags``; return what went wrong."""
    wrong = []
    plain = "--all" not in flags
    (folder / "demo").symlink_to(ROOT / "demo")
    async with suite_up(*flags, cwd=folder) as addresses:
        front = addresses["processor"]
        monkeypatch.setenv("MILLSTREAM_ADDRESS", front)
        monkeypatch.chdir(folder)
        for command, shown in _COMMANDS.items():
            done = await _run(shown, command, folder)
            fails = shown.plain if plain else ""
            code_fits = done.code == (1 if fails else 0) or command == "doctor"
            printed, expected = (done.err, fails) if fails else (done.out, shown.everywhere)
            if not code_fits or not re.search(expected, printed, re.MULTILINE):
                wrong.append(f"{command}: {done}")
        snippets = _blocks("docs/client.md", "python")
        for (word, shown), code in zip(_SNIPPETS.items(), snippets, strict=True):
            assert word in code
            said = await asyncio.to_thread(_said_by, code.replace("127.0.0.1:50051", front))
            expected = f"failed: .*{shown.plain}" if plain and shown.plain else shown.everywhere
            if not re.search(expected, said) or ("failed" in said and "failed" not in expected):
                wrong.append(f"{word}: {said}")
        wrong += await _with_curl(folder, addresses)
    return wrong


async def _with_curl(folder: Path, addresses: dict[str, str]) -> list[str]:
    """Run README.md's calls with buf and curl."""
    (folder / ".venv").symlink_to(sys.prefix)
    shown = "".join(_blocks("README.md", "sh"))
    calls = re.findall(r"^g?curl (?:.*\\\n)*.*$", shown, re.MULTILINE)
    # A decode worker that has its prompts from another one needs a ticket.
    script = "\n".join(call for call in calls if not call.endswith("/Decode"))
    script = script.replace("127.0.0.1:50051", addresses["processor"])
    script = script.replace("127.0.0.1:50071", addresses["decode-1"])
    alias = re.search(r"^alias gcurl=.*$", shown, re.MULTILINE)
    assert alias
    process = await asyncio.create_subprocess_exec(
        *("bash", "-e", "-c", f"shopt -s expand_aliases\n{alias[0]}\n{script}"),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    out = (await process.communicate())[0].decode()
    wanted = ('"chat.completion"', "finishReason", '"defaultOf"', '"workerId"')
    return [] if all(word in out for word in wanted) else [f"curl: {out}"]


def test_every_command_of_the_readme_is_run() -> None:
    assert list(dict.fromkeys(_readme_commands())) == list(_COMMANDS)


@pytest.mark.parametrize("flags", [(), ("--all",)], ids=["up", "up --all"])
async def test_the_pages_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    wrong = await follow_the_pages(tmp_path, monkeypatch, "--engine", "simulated", *flags)
    assert not wrong, "\n".join(wrong)
