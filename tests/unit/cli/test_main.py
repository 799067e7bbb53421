from __future__ import annotations

import re

import pytest

from millstream_server.cli.main import main

COMMANDS = ("up", "chat", "complete", "models", "top", "admin", "doctor")


def _help(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*args, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


def test_help_lists_all_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = _help(capsys)
    assert all(re.search(rf"^    {command} ", text, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_opens_with_a_sentence_and_ends_with_examples(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = _help(capsys, command)
    usage, sentence, *_ = text.split("\n\n")
    assert usage.startswith(f"usage: millstream {command}")
    assert re.match(r"[A-Z].*\.", sentence)
    examples = text.partition("\nexamples:\n")[2].strip().splitlines()
    assert 2 <= len(examples) <= 3
    assert all(f"millstream {command}" in line for line in examples)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert re.fullmatch(r"millstream \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [["--seed", "-1"], ["--seed", str(2**63)], ["--top-k", "1.5"], ["--max-new-tokens", "many"]],
    ids=" ".join,
)
def test_numbers_that_do_not_fit_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["complete", "x", *flags])
    assert left.value.code == 2
    assert f"argument {flags[0]}: {flags[1]!r} is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "usage", "says"),
    [
        (["chat", "--temprature", "0"], "chat", "no --temprature; did you mean --temperature?"),
        (["complete", "x", "--adress=a:1"], "complete", "no --adress; did you mean --address?"),
        (["admin", "drain", "--al"], "admin drain", "no --al; did you mean --all?"),
        (["complete", "what", "is", "it"], "complete", "what is 'is'? A text of several words"),
        (["chta"], "[-h]", "there is no command 'chta'; did you mean chat?"),
        (["health", "--servise", "x"], "health", "no --servise; did you mean --service?"),
    ],
)
def test_what_was_mistyped_is_explained_by_its_command(
    words: list[str], usage: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(words)
    assert left.value.code == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"usage: millstream {usage} ")
    assert says in shown.splitlines()[-1]


def test_up_without_a_model_says_what_to_give(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream_server.cli.suite.models.default_model", lambda **_: None)
    assert main(["up"]) == 1
    assert "give --model DIR" in capsys.readouterr().err
