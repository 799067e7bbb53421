"""What shells complete; bash runs the script, the others are not installed everywhere."""

from __future__ import annotations

import importlib.util
import subprocess

import pytest

from millstream_server.cli.main import main

_HAS_SHTAB = importlib.util.find_spec("shtab") is not None
_TRY = """
complete_words() {
  COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
  "$(complete -p millstream | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
  echo "${COMPREPLY[@]}"
}
complete_words millstream ch
complete_words millstream chat --temp
complete_words millstream admin undr
"""


@pytest.mark.skipif(not _HAS_SHTAB, reason="shtab is not installed")
def test_bash_completes_commands_and_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", script + _TRY], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["chat check", "--temperature", "undrain"]


@pytest.mark.skipif(not _HAS_SHTAB, reason="shtab is not installed")
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "temperature" in script
    assert "undrain" in script


def test_a_shell_that_is_not_known_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["completion", "csh"])
    assert left.value.code == 2
    assert "choose from" in capsys.readouterr().err
