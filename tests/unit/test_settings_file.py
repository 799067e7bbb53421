"""The settings file: below flags and environment, with sections; mistakes have their line."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import jsonschema
import pytest
import yaml

from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.settings import (
    EngineArguments,
    declared,
    load,
    read_first,
    schema,
    setting,
)
from millstream_server.runtime.settings.show import plain

ALL = (ProcessorSettings, EncodeSettings, DecodeSettings, MediaDiffusionSettings, EmbeddingSettings)


class Speed(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    count: int = setting(3, help="how many")
    drain_s: float = setting(60.0, help="how long")
    loud: bool = setting(default=False, help="shout")
    speed: Speed = setting(Speed.FAST, help="how fast")
    tls_cert_file: Path | None = setting(None, help="where")
    tls_key_file: Path | None = setting(None, help="where the key is")
    tls_name: str = setting("", help="who")
    parts: tuple[str, ...] = setting((), help="of what")
    models: tuple[str, ...] = setting((), help="which", pairs=True)
    tls_pin: str = setting("", help="secret", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Driven:
    """Settings with an engine's own arguments, which are read as they stand."""

    engine: str = setting("", help="which")
    engine_args: EngineArguments = setting(EngineArguments(), help="its own")

    def checked(self) -> Self:
        return self


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def read(
    file: Path,
    text: str,
    *argv: str,
    cls: type[Any] = Settings,
    env: Mapping[str, str] | None = None,
) -> Any:
    file.write_text(text)
    return load(cls, ["--config", str(file), *argv], env or {}, prog="p", description="d")


def test_every_kind_of_value(file: Path) -> None:
    settings = read(
        file,
        """
        count: 1e+09  # as Helm writes a large whole number
        drain_s: 5
        loud: true
        speed: slow
        tls: {cert_file: /a, key: {file: /b}, name: "123"}
        parts: ["a,b", c]
        models: {chat: /models/chat, drawing: }
        """,
    )
    assert settings == Settings(
        count=10**9,
        drain_s=5.0,
        loud=True,
        speed=Speed.SLOW,
        tls_cert_file=Path("/a"),
        tls_key_file=Path("/b"),
        tls_name="123",
        parts=("a,b", "c"),
        models=("chat=/models/chat", "drawing"),
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "tls:\n  # cert_file: /a\n"])
def test_defaults(file: Path, text: str) -> None:
    assert read(file, text) == Settings()


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(file: Path) -> None:
    text = "count: 1\ndrain_s: 1\ntls_name: file\n"
    env = {"MILLSTREAM_COUNT": "2", "MILLSTREAM_DRAIN_S": "2"}
    settings = read(file, text, "--count", "3", env=env)
    assert (settings.count, settings.drain_s, settings.tls_name) == (3, 2.0, "file")
    assert settings.speed is Speed.FAST


def test_the_environment_may_name_the_file(file: Path) -> None:
    file.write_text("count: 7\n")
    env = {"MILLSTREAM_CONFIG": str(file)}
    assert load(Settings, [], env, prog="p", description="d").count == 7


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\ncuont: 1", "line 2: there is no setting cuont; did you mean count?"),
        ("drain-s: 1", "there is no setting drain-s; did you mean drain_s?"),
        ("tls: {cert: {fil: /a}}", "there is no setting tls_cert_fil; did you mean tls_cert_file?"),
        ("zzz: 1", "there is no setting zzz; --help lists them"),
        ("count: 1\ncount: 2", "line 2: count is there twice"),
        ("tls: {name: a}\ntls: {}", "line 2: tls is there twice"),
        ("tls: {name: a}\ntls_name: b", "line 2: tls_name is there twice, first in line 1"),
        ("models: {a: b, a: c}", "a is there twice"),
        ("tls: {pin: x}", "tls_pin is a secret, which a file may not have: set MILLSTREAM_TLS_PIN"),
        ("count: many", "line 1: count: 'many' is not a whole number, 0 or more"),
        ("count: '7'", "count: '7' is not a whole number"),
        ("count: 1.5", "count: 1.5 is not a whole number"),
        ("count: -2", "count: -2 is not a whole number"),
        ("count: true", "count: true is not a whole number"),
        ("count: [1]", "count: [1] is not a whole number"),
        ("count:", "count: nothing is not a whole number"),
        ("count: {a: 1}", "line 1: count is a setting, not a section"),
        ("drain_s: .inf", "drain_s: '.inf' is not a number, 0 or more"),
        ("loud: yes", "loud: 'yes' is not true or false"),
        ("speed: warp", "speed: 'warp' is not one of fast, slow"),
        ("speed: 1", "speed: 1 is not one of fast, slow; put it in quotes"),
        ("tls_name: 1.10", "tls_name: 1.1 is not text; put it in quotes"),
        ("tls_cert_file: 5", "tls_cert_file: 5 is not text, a path; put it in quotes"),
        ("parts: a,b", "parts: 'a,b' is not a list of texts"),
        ("parts: {a: b}", "line 1: parts is a setting, not a section"),
        ("models: a", "models: 'a' is not a list of texts, or a mapping of names to texts"),
        ("tls: x", "line 1: section tls is a mapping of settings: NAME: VALUE"),
        ("- count", "a settings file is a mapping of settings"),
        ("1: 2", "1 is not a setting's name"),
        ("count: [", "while parsing a flow"),
        ("count: 1\n---\ncount: 2", "expected a single document"),
        ("count: !!python/name:os.system", "can't be used here"),
        ("count: !!int many", "the tag tag:yaml.org,2002:int can't be used here"),
        ("count: &a 1\ndrain_s: *a", "*a: aliases can't be used here; write the value again"),
        ("parts: &a [*a]", "*a: aliases can't be used here"),
        (f"count: {'9' * 5000}", "count: inf is not a whole number"),
        (f"drain_s: {'9' * 400}", "drain_s: inf is not a number, 0 or more"),
        (f"parts: {'[' * 5000}", "too many levels of sections or lists"),
        ("models: {a: 5}", "models: a: 5 is not a name without '=', and a text"),
        ("models: {a=b: c}", "models: a=b: 'c' is not a name without '=', and a text"),
        ("#" * ((1 << 20) + 1), "it has 1048577 bytes, and 1048576 are the most"),
    ],
)
def test_what_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read(file, text)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert sentence in told
    assert str(file) in told


def test_a_file_that_is_not_there(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Settings, ["--config", str(file)], {}, prog="p", description="d")
    assert f"--config {file}: the file can't be read: No such file" in capsys.readouterr().err


def test_a_pipe_is_refused_since_it_can_be_read_only_once(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(file)
    with pytest.raises(SystemExit):
        load(Settings, ["--config", str(file)], {}, prog="p", description="d")
    assert (
        f"--config {file}: the file can't be read: it is not a regular" in capsys.readouterr().err
    )


def test_the_first_settings_are_read_from_a_file_with_others(file: Path) -> None:
    file.write_text("speed: slow\nmodel: {path: /a}\nkey: x\n")

    @dataclass(frozen=True, slots=True, kw_only=True)
    class First:
        speed: Speed = setting(Speed.FAST, help="how fast")

    assert (
        read_first(First, ["--config", str(file), "--x", "--", "--speed"], {}).speed is Speed.SLOW
    )


# ---- an engine's own arguments -------------------------------------------------------------------


def test_arguments_are_taken_from_all_three(file: Path) -> None:
    env = {"MILLSTREAM_ENGINE_ARGS": "--tp-size 4 --name 'a b'"}
    text = "engine: {args: {tp_size: 2, nested: {a: [1]}}}"
    found = read(file, text, "--", "--x", "--", "y", cls=Driven, env=env).engine_args
    assert found.file == {"tp_size": 2, "nested": {"a": [1]}}
    assert found.environment == ("--tp-size", "4", "--name", "a b")
    assert found.flags == ("--x", "--", "y")


@pytest.mark.parametrize(
    ("cls", "argv", "env", "sentence"),
    [
        (Settings, ["--", "--a"], "", "p runs no engine that takes arguments of its own"),
        (Driven, ["--tp", "8"], "", "--tp 8 (the engine's own arguments go behind --)"),
        (Driven, [], "--a 'b", "MILLSTREAM_ENGINE_ARGS: No closing quotation"),
    ],
)
def test_arguments_that_are_refused(
    capsys: pytest.CaptureFixture[str], cls: type[Any], argv: list[str], env: str, sentence: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(cls, argv, {"MILLSTREAM_ENGINE_ARGS": env}, prog="p", description="d")
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err


def test_arguments_that_are_no_mapping(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(file, "engine_args: --tp-size 8", cls=Driven)
    assert "line 1: engine_args: it must be a mapping" in capsys.readouterr().err


# ---- what is shown -------------------------------------------------------------------------------


def test_what_is_printed_is_a_file_with_the_same_settings(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "models: {a: /ä, b: }\ntls: {name: 'no'}\ncount: 5\n"
    env = {"MILLSTREAM_TLS_PIN": "hidden", "MILLSTREAM_DRAIN_S": "1e-05"}
    with pytest.raises(SystemExit):
        read(file, text, "--loud", "yes", "--print-config", env=env)
    printed = capsys.readouterr().out
    assert "hidden" not in printed
    assert "count: 5  # file, line 3\n" in printed
    again = read(file, printed, env={"MILLSTREAM_TLS_PIN": "hidden"})
    assert again == read(file, text, "--loud", "yes", env=env)
    assert again.drain_s == 1e-05


@pytest.mark.parametrize("cls", ALL)
def test_the_schema_takes_every_setting_alone_and_in_sections(cls: type[Any]) -> None:
    made = schema(cls)
    check = jsonschema.Draft202012Validator(made)
    check.check_schema(made)
    secrets = [f.name for f in declared(cls) if f.metadata["secret"]]
    assert list(made["x-environment-only"]) == [f"MILLSTREAM_{name.upper()}" for name in secrets]
    for f in declared(cls):
        if f.metadata["secret"] or f.default is dataclasses.MISSING:
            continue
        check.validate({f.name: plain(f.default)})
        section, _, rest = f.name.rpartition("_")
        if section:
            check.validate({section: {rest: plain(f.default)}})
    for name in (*secrets, "no_such_setting", "config"):
        assert not check.is_valid({name: "x"})
    assert not check.is_valid({"drain_s": "60"})
    assert check.is_valid({"drain": {"s": 60}})


@pytest.mark.parametrize(
    "text",
    [
        "tls: {cert_file: /a}",
        "tls: {cert: {file: 3}}",
        "engine: {args: {a: [1]}}",
        "engine: x",
        "drain_s: 1e+01",
        "max_open_requests: 1e+02",
        "max_open_requests: 1.5",
        "allowed_peers: a",
        "tls:",
        "log_level: warm",
    ],
)
def test_the_schema_agrees_with_the_reader(file: Path, text: str) -> None:
    """A file's values as another YAML library reads them."""
    value = yaml.safe_load(text.replace("1e+01", "10.0").replace("1e+02", "100.0"))
    valid = jsonschema.Draft202012Validator(schema(DecodeSettings)).is_valid(value)
    try:
        read(file, text, cls=Unchecked)
        taken = True
    except SystemExit:
        taken = False
    assert taken == valid


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchecked(DecodeSettings):
    """Without a look at SGLang's own arguments, for which SGLang would be imported."""

    def checked(self) -> Self:
        return self
