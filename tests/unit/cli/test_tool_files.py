"""Functions from a file: what the file may have, and what is run of it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from millstream_server.cli.tool_files import ToolFile

CLOCK = {"type": "function", "function": {"name": "clock", "description": "Tell the time."}}


def written(path: Path, given: Any) -> ToolFile:
    path.write_text(json.dumps(given), encoding="utf-8")
    return ToolFile.read(str(path))


def running(code: str) -> dict[str, Any]:
    """Return a function whose command is a Python program."""
    return {"name": "prog", "command": [sys.executable, "-c", code]}


async def asked(call: str) -> str:
    return f"asked: {call}"


async def test_the_user_is_asked_unless_commands_are_to_run(tmp_path: Path) -> None:
    echo = running("import sys; print(sys.stdin.read().upper())")
    file = written(tmp_path / "tools.json", [CLOCK, echo])
    for run, said in ((False, 'asked: prog {"a": "x; ls"}'), (True, '{"A": "X; LS"}')):
        clock, prog = file.tools(asked, run=run)
        assert (clock.tool.description, prog.tool.name) == ("Tell the time.", "prog")
        assert await clock.call() == "asked: clock {}"
        assert await prog.call(a="x; ls") == said


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import sys; sys.exit(3)", "it ended with code 3"),
        ("while True: print('x' * 9999)", "it writes more than 1048576 bytes"),
    ],
)
async def test_a_command_that_fails_says_why(tmp_path: Path, code: str, why: str) -> None:
    (prog,) = written(tmp_path / "tools.json", [running(code)]).tools(asked, run=True)
    with pytest.raises(RuntimeError, match=why):
        await prog.call()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"name": "clock"}, "it must be a list of functions"),
        (["clock"], 'a function is an object, not "clock"'),
        ([{"name": "clock", "command": "date"}], '"command" is a list of texts'),
        ([{"name": "clock", "strange": 1}], "'strange' of a tool can't be sent"),
        ([{"description": "?"}], "'name'"),
    ],
)
def test_a_file_that_is_no_list_of_functions(tmp_path: Path, given: Any, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        written(tmp_path / "tools.json", given)
