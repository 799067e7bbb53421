"""An engine's own arguments: read by its own parser, from three sources, mistakes told by name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.runtime.settings import EngineArguments, SettingsError, describe, load
from millstream_server.runtime.settings.arguments import ArgumentList, read_arguments


class _Upper(argparse.Action):
    """An action of the engine's own, whose value is no JSON."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: Any = None) -> None:
        setattr(namespace, self.dest, {each.upper() for each in values})


def _add(parser: argparse.ArgumentParser) -> dict[str, str]:
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--mode")
    parser.add_argument("--tp-size", "--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--share", type=float)
    parser.add_argument("--policy", choices=("fcfs", "lpm"))
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--fuse", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--overrides")
    parser.add_argument("--adapters", nargs="*", action=_Upper)
    parser.add_argument("--api-key")
    parser.add_argument("--alone")
    parser.set_defaults(of_the_engine_itself=1)
    return {"alone": "E takes it alone"}


_KNOWN = ArgumentList(
    engine="E",
    managed={"model_path": "--model-path", "mode": "it follows from the service"},
    add_to=_add,
    only_in_file=("parts",),
)


def read(
    *flags: str, environment: tuple[str, ...] = (), file: dict[str, Any] | None = None
) -> EngineArguments:
    return read_arguments(EngineArguments(file or {}, environment, flags), _KNOWN)


def test_types_are_the_engines() -> None:
    found = read("--tp-size=8", "--share", ".5", "--fast", "--no-fuse", "--sizes", "1", "2")
    assert found.values == {
        "tp_size": 8, "share": 0.5, "fast": True, "fuse": False, "sizes": [1, 2]
    }  # fmt: skip
    assert found.shown == found.values


@pytest.mark.parametrize("name", ["no_fuse", "no-fuse"])
def test_a_file_may_name_the_negation(name: str) -> None:
    assert read(file={name: True}).values == {"fuse": False}
    assert read(file={name: False}).values == {"fuse": True}


def test_a_file_says_the_same() -> None:
    found = read(
        file={
            "tensor-parallel-size": 8,
            "share": 0.5,
            "fast": True,
            "fuse": False,
            "sizes": [1, 2],
            "overrides": {"a": [1]},
            "policy": None,
            "parts": {"vae": "/x"},
        }
    )
    assert found.values == {
        "tp_size": 8,
        "share": 0.5,
        "fast": True,
        "fuse": False,
        "sizes": [1, 2],
        "overrides": '{"a": [1]}',
        "parts": {"vae": "/x"},
    }
    assert read(file={"fast": False}).values == {}


def test_each_argument_is_taken_from_the_first_source_that_has_it() -> None:
    found = read(
        *("--tp_size", "4"),
        environment=("--tp-size", "3", "--share", "0.3"),
        file={"tp_size": 2, "share": 0.2, "policy": "lpm"},
    )
    assert found.values == {"tp_size": 4, "share": 0.3, "policy": "lpm"}
    assert {name: each.source for name, each in found.read.items()} == {
        "tp_size": "flag", "share": "environment", "policy": "file"
    }  # fmt: skip


def test_what_is_shown_can_be_given_again_and_hides_keys() -> None:
    found = read("--adapters", "a", "b", "--api-key", "hidden")
    assert found.values == {"adapters": {"A", "B"}, "api_key": "hidden"}
    assert found.shown == {"adapters": ["a", "b"], "api_key": "***"}
    assert read(file={"adapters": ["a", "b"]}).values == {"adapters": {"A", "B"}}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--tp-sise", "8"], "arguments behind --: there is no --tp-sise; did you mean --tp-size?"),
        (["--zzz"], "there is no --zzz"),
        (["--tp", "8"], "there is no --tp"),
        (["--tp-size", "many"], "argument --tp-size/--tensor-parallel-size: invalid int value"),
        (["--tp-size"], "expected one argument"),
        (["--policy", "best"], "invalid choice: 'best' (choose from 'fcfs', 'lpm')"),
        (["--fast", "true"], "'true' belongs to no argument"),
        (["8"], "'8' belongs to no argument"),
        (["--model", "/x"], "--model is not yours to set: use --model-path"),
        (["--alone", "x"], "--alone is not yours to set: E takes it alone"),
        (["--mode", "x"], "--mode is not yours to set: it follows from the service"),
    ],
)  # fmt: skip
def test_flags_that_are_refused(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(*flags)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"tp_sise": 8}, "in engine_args of the file: there is no tp_sise; did you mean tp_size?"),
        ({"model-path": "/x"}, "model-path is not yours to set: use --model-path"),
        ({"tp_size": "many"}, "invalid int value: 'many'"),
        ({"fast": 1}, "fast is true or false, not 1"),
    ],
)
def test_entries_that_are_refused(file: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read(file=file)
    assert sentence in str(refused.value)


def test_the_environment_is_named() -> None:
    with pytest.raises(SettingsError, match="in MILLSTREAM_ENGINE_ARGS: there is no --x"):
        read(environment=("--x",))


def test_an_engine_that_is_not_there_is_named() -> None:
    def missing(_parser: argparse.ArgumentParser) -> dict[str, str]:
        raise ModuleNotFoundError("No module named 'sglang'")

    known = ArgumentList(engine="E", managed={}, add_to=missing)
    assert read_arguments(EngineArguments(), known) == EngineArguments(), "nothing is imported"
    with pytest.raises(SettingsError, match=r"E can't be imported, .* No module named 'sglang'"):
        read_arguments(EngineArguments(flags=("--x",)), known)


@pytest.mark.parametrize(
    ("cls", "engine"),
    [
        (MediaDiffusionSettings, "diffusers"),
    ],
)
def test_an_engine_that_takes_none_refuses_them(
    capsys: pytest.CaptureFixture[str], cls: type[Any], engine: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        load(cls, ["--engine", engine, "--", "--tp-size", "2"], {}, prog="p", description="d")
    assert stopped.value.code == 2
    sentence = f"an engine's own arguments behind --, but the engine is {engine}, which takes none"
    assert sentence in capsys.readouterr().err
    settings: object = load(cls, ["--engine", engine], {}, prog="p", description="d")
    assert describe(settings)["engine_args"] == {}


@pytest.mark.parametrize("cls", [WorkerSettings, EmbeddingSettings, MediaDiffusionSettings])
def test_a_simulated_engine_has_arguments_of_its_own(
    capsys: pytest.CaptureFixture[str], cls: type[Any]
) -> None:
    def said(*arguments: str) -> str:
        argv = ["--engine", "simulated", "--", *arguments]
        with pytest.raises(SystemExit) as stopped:
            load(cls, argv, {}, prog="p", description="d")
        assert stopped.value.code == 2
        return capsys.readouterr().err

    settings: object = load(
        cls, ["--engine", "simulated", "--", "--load-s", "1.5"], {}, prog="p", description="d"
    )
    assert describe(settings)["engine_args"] == {"load_s": 1.5}
    assert "--load-s: 'soon' is not a number, 0 or more" in said("--load-s", "soon")
    assert "there is no --tp-size" in said("--tp-size", "2")
