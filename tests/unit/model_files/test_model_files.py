"""Which files are wanted, what a directory's marks mean, and what is refused before a download."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from millstream_server.cli.suite.models import PlanError, Task, choose_further, choose_model
from millstream_server.engines.adapter import model_folder
from millstream_server.model_files import state
from millstream_server.model_files.__main__ import main
from millstream_server.model_files.fetch import Options, fetch, wait_for
from millstream_server.model_files.source import (
    FailedError,
    HubUri,
    Listing,
    RefusedError,
    RemoteFile,
    S3Uri,
    checked,
    parse_uri,
    wanted,
    without_weights,
)
from millstream_server.runtime.settings import SettingsError

URI = "hf://org/tiny"


def _files(*names: str) -> list[RemoteFile]:
    return [RemoteFile(name, 1, "tag") for name in names]


def _state(**changes: object) -> state.State:
    values = {"uri": URI, "revision": "r", "weights": True, "files": {"a": 3}, "tags": {}}
    return state.State(**{**values, **changes})  # type: ignore[arg-type]


class _Source:
    """A source with a plan for each attempt of its one file."""

    def __init__(self, *contents: bytes) -> None:
        self.contents = list(contents)

    def listing(self, revision: str | None) -> Listing:
        return Listing("r", [RemoteFile("a", 3, "tag")])

    def download(
        self, file: RemoteFile, directory: Path, revision: str, report: Callable[[int], None]
    ) -> None:
        (directory / file.name).write_bytes(self.contents.pop(0))


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hf://org/na.me-1", HubUri("org/na.me-1", None)),
        ("hf://org/name@refs/pr/1", HubUri("org/name", "refs/pr/1")),
        ("s3://bucket/a/b/", S3Uri("bucket", "a/b")),
    ],
)
def test_a_uri_is_read(text: str, parsed: object) -> None:
    assert parse_uri(text) == parsed


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("hf://name", "is not hf://org/name"),
        ("s3://bucket", "is not hf://org/name"),
        ("llama", "is not hf://org/name"),
        ("pvc://claim/llama", "a claim is mounted as it is"),
        ("oci://registry/x", "an image volume is mounted"),
    ],
)
def test_what_cannot_be_fetched_is_refused(
    text: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["fetch", text, str(tmp_path)]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.parametrize(
    ("given", "left_out"),
    [
        (("model.safetensors", "config.json"), set()),
        (("pytorch_model.bin", "config.json"), set()),
        (
            ("m-1.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json", "a.gguf"),
            {"pytorch_model.bin", "pytorch_model.bin.index.json", "a.gguf"},
        ),
        (("model.safetensors", "original/c.pth", "onnx/m.onnx"), {"original/c.pth", "onnx/m.onnx"}),
        (("model-1.safetensors", "consolidated.safetensors"), {"consolidated.safetensors"}),
        (("consolidated.safetensors", "params.json"), set()),
        (
            (
                "model_index.json",
                "all.safetensors",
                "unet/d.safetensors",
                "unet/d.fp16.safetensors",
            ),
            {"all.safetensors", "unet/d.fp16.safetensors"},
        ),
        # Nothing else holds these weights.
        (("model.safetensors", "head/weights.pt"), set()),
        (("unet/d.fp16.safetensors", "model_index.json"), set()),
    ],
)
def test_copies_of_the_weights_are_left_out(given: tuple[str, ...], left_out: set[str]) -> None:
    kept = {file.name for file in wanted(_files(*given, ".gitattributes"))}
    assert set(given) - kept == left_out


def test_a_processor_reads_no_weights() -> None:
    given = _files("config.json", "m.safetensors", "m.safetensors.index.json", "tokenizer.model")
    assert [file.name for file in without_weights(given)] == ["config.json", "tokenizer.model"]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../../x", "a\\..\\x"])
def test_no_file_name_leads_out_of_the_directory(name: str) -> None:
    with pytest.raises(RefusedError, match="leads out"):
        checked(_files(name))


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ([RemoteFile("a//b", 1, "")], "'a//b' leads out"),
        ([RemoteFile("a/./b", 1, "")], "'a/./b' leads out"),
        ([RemoteFile("a\nb", 1, "")], r"'a\\nb' has characters"),
        ([RemoteFile("a\ud800", 1, "")], r"'a\\ud800' has characters"),
        ([RemoteFile(None, 1, "")], "None has characters"),  # type: ignore[arg-type]
        ([RemoteFile("a", -1, "")], "a has no size, but -1"),
        ([RemoteFile("a", "9", "")], "a has no size, but '9'"),  # type: ignore[arg-type]
        (_files("a", "a/b/c"), "a is a file, and the folder of a/b/c"),
        (_files("a", "a"), "two files have the same name"),
        (_files(".millstream-lock"), "there are no files"),
    ],
)
def test_a_list_that_cannot_be_a_directory_is_refused(files: list[RemoteFile], says: str) -> None:
    with pytest.raises(RefusedError, match=says):
        checked(files)


def test_what_millstream_keeps_in_a_directory_is_no_file_of_the_model() -> None:
    given = _files("a", ".millstream-complete", ".cache/huggingface/download/a.metadata")
    assert [file.name for file in checked(given)] == ["a"]


def test_a_file_without_end_is_left(tmp_path: Path) -> None:
    class Endless(_Source):
        def download(
            self, file: RemoteFile, directory: Path, revision: str, report: Callable[[int], None]
        ) -> None:
            while True:
                report(1)

    with pytest.raises(FailedError, match="a is damaged: it has more than 3 bytes"):
        fetch(URI, Endless, tmp_path, Options(retries=0))


def test_at_least_one_file_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fetch", URI, str(tmp_path), "--parallel", "0"])
    assert "0 is not 1 or more" in capsys.readouterr().err


def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match=r"files that don't come from here: notes\.txt"):
        fetch(URI, _Source, tmp_path, Options())


def test_a_disk_that_is_too_small_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(RefusedError, match=r"has 0 MiB free; 0 MiB are missing"):
        fetch(URI, lambda: _Source(b"abc"), tmp_path, Options())
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    class Full(_Source):
        def download(self, *_: object) -> None:
            with Path("/dev/full").open("w") as file:
                file.write("x" * 100_000)

    with pytest.raises(RefusedError, match="is full"):
        fetch(URI, Full, tmp_path, Options())


def test_a_wrong_size_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    fetch(URI, lambda: _Source(b"ab", b"abc"), tmp_path, Options(retries=1))
    assert (tmp_path / "a").read_bytes() == b"abc"
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(FailedError, match="it has 2 bytes instead of 3"):
        fetch(URI, lambda: _Source(b"ab", b"ab"), tmp_path, Options(retries=1))


def test_pruning_takes_what_we_filled_and_nothing_else(tmp_path: Path) -> None:
    for name, mark in (("new", state.COMPLETE), ("old", state.COMPLETE), ("begun", state.PARTIAL)):
        (tmp_path / name).mkdir()
        state.write(tmp_path / name / mark, _state(files={}))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "weights").touch()
    assert main(["fetch", URI, str(tmp_path / "new"), "--prune"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"new", "theirs"}


def test_a_service_refuses_a_directory_that_lacks_files(tmp_path: Path) -> None:
    state.expect_weights(tmp_path)  # somebody's own
    state.write(tmp_path / state.PARTIAL, _state())
    with pytest.raises(SettingsError, match=rf"download of {URI} into .* 0 of 1 files"):
        state.expect_usable(tmp_path)
    (tmp_path / "a").write_bytes(b"abc")
    state.write(tmp_path / state.COMPLETE, _state())
    state.expect_weights(tmp_path)
    (tmp_path / state.PARTIAL).unlink()
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(SettingsError, match="lacks files of"):
        state.expect_usable(tmp_path)
    (tmp_path / "a").write_bytes(b"abc")
    state.write(tmp_path / state.COMPLETE, _state(weights=False))
    state.expect_usable(tmp_path)
    with pytest.raises(SettingsError, match="fetched with --without-weights"):
        state.expect_weights(tmp_path)


@pytest.mark.parametrize("given", ["Qwen/Qwen3-0.6B", "hf://Qwen/Qwen3-0.6B"])
def test_a_models_id_is_told_from_a_directory(
    given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = "model_files fetch hf://Qwen/Qwen3-0.6B Qwen/Qwen3-0.6B"
    with pytest.raises(SettingsError, match=command):
        state.expect_usable(Path(given))
    with pytest.raises(SettingsError, match=command):
        model_folder(Path(given), "sglang", "a model directory", "config.json")
    with pytest.raises(PlanError, match=command):
        choose_model(Path(given), "")
    with pytest.raises(PlanError, match=command):
        choose_further(Task.EMBEDDING, Path(given))
    Path("Qwen/Qwen3-0.6B").mkdir(parents=True)
    state.expect_usable(Path("Qwen/Qwen3-0.6B"))
    for path in (tmp_path / "none", Path("../none"), Path("none")):
        with pytest.raises(SettingsError, match=r"there is no config\.json in it"):
            model_folder(path, "sglang", "a model directory", "config.json")


def test_wait_ends_when_the_directory_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def meanwhile(_: float) -> None:
        nonlocal looks
        looks += 1
        fetch(URI, lambda: _Source(b"abc"), tmp_path / "m", Options())

    monkeypatch.setattr("time.sleep", meanwhile)
    wait_for(tmp_path / "m", timeout_s=60, period_s=0)
    assert looks == 1


def test_wait_gives_up_when_nothing_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    state.write(tmp_path / state.PARTIAL, _state())
    with pytest.raises(FailedError, match=r"nothing has arrived for 0 s \(0 MiB are there\)"):
        wait_for(tmp_path, timeout_s=0, period_s=0)
