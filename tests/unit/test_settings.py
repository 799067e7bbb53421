"""Settings: flags over environment over the file over defaults, and a sentence for each mistake."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from millstream_server.decode.app import DecodeSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.settings import (
    SettingsError,
    declared,
    describe,
    group,
    load,
    setting,
    unread_variables,
)
from millstream_server.runtime.transport.options import TransportOptions


class Speed(enum.Enum):
    FAST = "fast"
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    name: str = setting(help="who")
    count: int = setting(3, help="how many, 50% more at night")
    ratio: float = setting(0.5, help="how much")
    loud: bool = setting(default=False, help="shout")
    speed: Speed = setting(Speed.FAST, help="how fast")
    colour: Literal["red", "blue"] = setting("red", help="which")
    folder: Path | None = setting(None, help="where")
    parts: tuple[str, ...] = setting((), help="of what")
    key: str = setting("", help="the key", secret=True)


def read(*argv: str, **env: str) -> Settings:
    environment = {f"MILLSTREAM_{name.upper()}": value for name, value in env.items()}
    return load(Settings, argv, environment, prog="p", description="d")


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, **env: str) -> str:
    with pytest.raises(SystemExit) as stopped:
        read(*argv, **env)
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    assert read("--name", "x") == Settings(name="x")


def test_every_kind_of_value() -> None:
    settings = read(
        *("--name", "x", "--count", "7", "--ratio", "1e-3", "--loud", "Yes", "--speed", "slow"),
        *("--folder", "/a/b", "--parts", "a, b,,c", "--colour", "blue"),
    )
    assert settings == Settings(
        name="x",
        count=7,
        ratio=0.001,
        loud=True,
        speed=Speed.SLOW,
        colour="blue",
        folder=Path("/a/b"),
        parts=("a", "b", "c"),
    )


def test_a_flag_wins_over_the_environment_and_that_over_the_default() -> None:
    settings = read("--count", "1", name="env", count="2", ratio="0.25")
    assert (settings.name, settings.count, settings.ratio) == ("env", 1, 0.25)


def test_secrets_come_from_the_environment_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert read(name="x", key="abc").key == "abc"
    assert "unrecognized arguments: --key" in complaint(capsys, "--key", "abc", name="x")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--count", "many"], "--count: 'many' is not a whole number"),
        (["--count", "1.5"], "--count: '1.5' is not a whole number"),
        (["--count", "-7"], "--count: '-7' is not a whole number, 0 or more"),
        (["--ratio", "x"], "--ratio: 'x' is not a number"),
        (["--ratio", "nan"], "--ratio: 'nan' is not a number, 0 or more"),
        (["--ratio", "-0.5"], "--ratio: '-0.5' is not a number, 0 or more"),
        (["--loud", "maybe"], "--loud: 'maybe' is not true or false"),
        (["--speed", "warp"], "--speed: 'warp' is not one of fast, slow"),
        (["--colour", "green"], "--colour: 'green' is not one of red, blue"),
        (["--nmae", "x"], "unrecognized arguments: --nmae x"),
        (["--coun", "3"], "unrecognized arguments: --coun 3"),
    ],
)
def test_what_does_not_parse_is_named(
    capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert sentence in complaint(capsys, "--name", "x", *flags)


def test_the_environment_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = complaint(capsys, name="x", count="many")
    assert "MILLSTREAM_COUNT: 'many' is not a whole number" in sentence


def test_a_missing_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sentence = complaint(capsys)
    where = "(or MILLSTREAM_NAME in the environment, or name in the file)"
    assert f"--name is required {where}: who" in sentence


def test_an_empty_optional_is_none() -> None:
    assert read(name="x", folder="").folder is None


def test_help_shows_defaults_and_survives_percent_signs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--help")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "how many, 50% more at night (default: 3)" in text
    assert "--key" not in text
    assert "From the environment only: MILLSTREAM_KEY: the key" in text
    assert "else the YAML file that\n--config or MILLSTREAM_CONFIG names" in text


def test_print_config_masks_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        read("--print-config", "--parts", "a,b", name="x", key="abc", folder="/a")
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert "abc" not in text
    assert text.splitlines() == [
        'name: "x"  # environment',
        "count: 3  # default",
        "ratio: 0.5  # default",
        "loud: false  # default",
        'speed: "fast"  # default',
        'colour: "red"  # default',
        'folder: "/a"  # environment',
        'parts: ["a", "b"]  # flag',
        "# key: ***  # environment, MILLSTREAM_KEY",
    ]
    assert describe(Settings(name="x"))["key"] == ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    depth: int = setting(4, help="how deep")
    pin: str = setting("", help="its own secret", secret=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    before: int = setting(1, help="first")
    part: Part = group(Part)
    after: int = setting(2, help="last")


def test_a_groups_settings_are_read_and_told_as_if_they_were_the_components_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = {"MILLSTREAM_PIN": "abc", "MILLSTREAM_AFTER": "9"}
    settings = load(Whole, ["--depth", "7"], env, prog="p", description="d")
    assert settings == Whole(part=Part(depth=7, pin="abc"), after=9)
    assert describe(settings) == {"before": 1, "depth": 7, "pin": "***", "after": 9}
    assert [f.name for f in declared(Whole)] == ["before", "depth", "pin", "after"]
    with pytest.raises(SystemExit):
        load(Whole, ["--depth", "x"], {}, prog="p", description="d")
    assert "--depth: 'x' is not a whole number" in capsys.readouterr().err


@pytest.mark.parametrize("cls", [DecodeSettings, WorkerSettings, ProcessorSettings])
def test_no_setting_is_declared_twice(cls: type) -> None:
    names = [f.name for f in declared(cls)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("cls", [DecodeSettings, WorkerSettings, ProcessorSettings])
def test_the_services_settings_can_be_read(cls: type) -> None:
    env = {"MILLSTREAM_MODELS": "m=/d", "MILLSTREAM_WORKERS": "a:1"}
    settings: object = load(cls, [], env, prog="p", description="d")
    assert json.dumps(describe(settings))


@pytest.mark.parametrize("entry", ["=dir", "tiny="])
def test_half_a_model_is_named(entry: str) -> None:
    settings = ProcessorSettings(models=(entry,), workers=())
    with pytest.raises(SettingsError, match=f"--models: '{entry}' is neither NAME=DIR nor NAME"):
        settings.model_directories()


def test_a_model_may_have_no_directory() -> None:
    settings = ProcessorSettings(models=("chat=/d", "drawing"), workers=())
    assert settings.model_directories() == {"chat": Path("/d"), "drawing": None}


def test_limits_are_shares_of_one_budget_of_memory_and_one_number_of_streams() -> None:
    settings = ProcessorSettings(models=(), workers=())
    assert settings.transport() == TransportOptions(
        max_receive_bytes=4 << 20,
        max_connection_age_s=1800.0,
        max_connection_age_grace_s=3600.0,
    )
    assert settings.max_media_item_bytes == 64 << 20
    assert settings.max_queued_tokens == 32 << 20
    assert settings.max_request_tokens == 4 << 20
    assert settings.prefix_index_blocks == 2 << 20


def test_shares_of_small_numbers_leave_room_for_calls() -> None:
    settings = ProcessorSettings(
        models=(), workers=(), max_open_streams=1, max_open_bytes=100, max_receive_bytes=60
    )
    options = settings.transport()
    counts = (options.max_streams, options.max_connections, options.max_connections_per_address)
    assert (*counts, options.max_resets) == (100, 100, 100, 100)
    assert (options.max_received_bytes, options.max_unsent_bytes) == (60, 60)


@pytest.mark.parametrize(
    "origin", ["*", "https://app.example", "http://127.0.0.1:8000", "http://[::1]:8000"]
)
def test_origins_of_pages(origin: str) -> None:
    settings = ProcessorSettings(models=(), workers=(), cors_origins=(origin,))
    assert settings.transport().cors_origins == {origin}


@pytest.mark.parametrize(
    "origin", ["", "app.example", "https://app.example/", "https://App.example", "https://*.x.y"]
)
def test_what_is_no_origin_of_a_page_is_refused(origin: str) -> None:
    settings = ProcessorSettings(models=(), workers=(), cors_origins=(origin,))
    with pytest.raises(SettingsError, match=r"--cors-origins: .* as browsers send it"):
        settings.transport()


def test_a_variable_that_no_program_reads_is_found_with_what_was_probably_meant() -> None:
    env = dict.fromkeys(
        ("MILLSTREAM_LOGLEVEL", "MILLSTREAM_XYZZY", "LOGLEVEL", "XMILLSTREAM_A"), ""
    )
    assert unread_variables(env) == [
        "MILLSTREAM_LOGLEVEL (did you mean MILLSTREAM_LOG_LEVEL?)",
        "MILLSTREAM_XYZZY",
    ]


@pytest.mark.parametrize(
    "name",
    [
        *("CONFIG", "ENGINE_ARGS", "TICKET_KEY", "API_KEY", "ADMIN_KEY", "ADDRESS", "STORAGE_URL"),
        *("PORT", "SERVICE_HOST", "SERVICE_PORT"),
        *("PROCESSOR_SERVICE_HOST", "PROCESSOR_SERVICE_PORT", "PROCESSOR_SERVICE_PORT_GRPC"),
        *("PROCESSOR_PORT", "PROCESSOR_PORT_50051_TCP", "PROCESSOR_PORT_50051_TCP_ADDR"),
    ],
)
def test_what_any_program_reads_or_kubernetes_sets_is_not_told(name: str) -> None:
    assert unread_variables({f"MILLSTREAM_{name}": "x"}) == []


@pytest.mark.parametrize(
    ("listen", "hosts", "asked_for"),
    [
        ("0.0.0.0:50051", ("a.example",), None),
        ("192.0.2.1:50051", (), None),
        ("unix:/a", (), None),
        ("127.0.0.1:50051", (), set()),
        ("[::1]:50051", ("a.example", "[fd00::2]"), {"a.example", "[fd00::2]"}),
        ("localhost:50051", ("*",), {"*"}),
    ],
)
def test_hosts_are_asked_for_where_a_loopback_address_is_named(
    listen: str, hosts: tuple[str, ...], asked_for: set[str] | None
) -> None:
    settings = ProcessorSettings(models=(), workers=(), listen=listen, hosts=hosts)
    assert settings.transport().hosts == asked_for


@pytest.mark.parametrize(
    "host", ["", "a.example:80", "http://a.example", "A.example", "*.a.example"]
)
def test_what_is_no_host_is_refused(host: str) -> None:
    settings = ProcessorSettings(models=(), workers=(), hosts=(host,))
    with pytest.raises(SettingsError, match=r"--hosts: .* as browsers send it"):
        settings.transport()
