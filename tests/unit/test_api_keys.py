"""API keys: what a file may hold, when it is read again, and how keys are compared."""

from __future__ import annotations

import hashlib
import hmac
import logging
from pathlib import Path

import pytest

from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.settings import SettingsError
from tests.support.telemetry.logged import fields_of

KEY = "k-0123456789abcdef"


def _sha256(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_a_change_that_time_stamps_dont_show_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}")
    keys = ApiKeys(file=file)
    same_tick = file.stat()
    monkeypatch.setattr(Path, "stat", lambda _: same_tick)
    for number in range(3):
        key = f"{number:0{len(KEY)}}"
        file.write_text(f"alice:{key}")
        assert keys.name_of(key) == "alice"
        assert keys.name_of(KEY) is None


def test_an_old_file_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}")
    keys = ApiKeys(file=file)
    monkeypatch.setattr("time.time", lambda: file.stat().st_ctime + 60)
    assert keys.name_of(KEY) == "alice"

    def unreadable(*_: object, **__: object) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(Path, "open", unreadable)
    assert keys.name_of(KEY) == "alice"


@pytest.mark.parametrize("broken", ["", "# none\n", "alice", "alice:short", "\xff", "gone"])
def test_a_broken_file_leaves_the_keys_and_one_warning(
    tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    file.write_text(f"alice:{KEY}")
    keys = ApiKeys(file=file)
    caplog.clear()
    if broken == "gone":
        file.unlink()
    else:
        file.write_bytes(broken.encode("latin-1"))
    assert [keys.name_of(KEY) for _ in range(3)] == ["alice"] * 3
    (warning,) = caplog.records
    assert str(fields_of(warning)["reason"]).startswith("--api-keys-file: ")
    file.write_text(f"bob:{KEY}")
    assert keys.name_of(KEY) == "bob"


def test_every_digest_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    real = hmac.compare_digest

    def counting(stored: bytes, presented: bytes) -> bool:
        compared.append(stored)
        assert len(stored) == len(presented) == 32
        return real(stored, presented)

    keys = ApiKeys(inline=",".join(f"n{i}:{i:020}" for i in range(10)))
    monkeypatch.setattr(hmac, "compare_digest", counting)
    for key, name in ((f"{0:020}", "n0"), (f"{9:020}", "n9"), ("no such key at all", None)):
        compared.clear()
        assert keys.name_of(key) == name
        assert len(set(compared)) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "holds no key"),
        ("alice", "{}1 is not NAME:KEY"),
        (f":{KEY}", "{}1 is not NAME:KEY"),
        (f"al ice:{KEY}", "{}1 is not NAME:KEY"),
        ("alice:0123456789abcde", "{}1: a key has at least 16 characters"),
        ("alice:sha256:abcd", "{}1: a SHA-256 has 64 hex digits"),
        ("alice:0123456789abcdéf", "{}1: a key has visible ASCII characters"),
        ("alice:0123 56789abcdef", "{}1: a key has visible ASCII characters"),
        (f"alice:{KEY}|bob:{_sha256(KEY)}", "alice and bob have the same key"),
    ],
)
def test_bad_keys_stop_the_start_and_are_not_quoted(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(text.replace("|", "\n"))
    with pytest.raises(SettingsError) as in_file:
        ApiKeys(file=file)
    with pytest.raises(SettingsError) as in_environment:
        ApiKeys(inline=text.replace("|", ","))
    for caught, setting, unit in (
        (in_file, "--api-keys-file", "line "),
        (in_environment, "MILLSTREAM_API_KEYS", "entry "),
    ):
        assert setting in str(caught.value)
        assert sentence.format(unit) in str(caught.value)
        assert "0123" not in str(caught.value)


def test_a_missing_file_stops_the_start_and_a_world_readable_one_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    with pytest.raises(SettingsError, match=r"--api-keys-file: can't read .*keys"):
        ApiKeys(file=file)
    file.write_text(f"alice:{KEY}")
    # Kubernetes mounts a link to a file of mode 0444 or 0440, of a group that may have other users.
    link = tmp_path / "link"
    link.symlink_to(file)
    for mode, warnings in ((0o644, 1), (0o444, 1), (0o640, 0), (0o660, 0), (0o440, 0)):
        file.chmod(mode)
        caplog.clear()
        assert ApiKeys(file=link).name_of(KEY) == "alice"
        assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == warnings


@pytest.mark.parametrize("mode", [0o666, 0o602])
def test_a_file_that_everybody_may_write_to_is_refused(
    tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    file, link = tmp_path / "keys", tmp_path / "link"
    file.write_text(f"alice:{KEY}")
    file.chmod(0o600)
    link.symlink_to(file)
    keys = ApiKeys(file=link)
    file.write_text(f"mallory:{KEY}")
    file.chmod(mode)
    caplog.clear()
    assert keys.name_of(KEY) == "alice"
    (warning,) = caplog.records
    sentence = f"--api-keys-file: every user of this machine may write to {link}, and so let "
    assert str(fields_of(warning)["reason"]).startswith(sentence)
    with pytest.raises(SettingsError, match=f"chmod o-w {link}$"):
        ApiKeys(file=link)
    file.chmod(0o600)
    assert keys.name_of(KEY) == "mallory"
