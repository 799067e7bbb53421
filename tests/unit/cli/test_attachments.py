from __future__ import annotations

from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from millstream_client import Image, Video
from millstream_server.cli.attachments import Attachments, ChatCompleter


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cat.png").write_bytes(b"cat")
    (tmp_path / "it's a dog.png").write_bytes(bytes(1536))
    (tmp_path / "film.mp4").write_bytes(bytes(3 << 20))
    (tmp_path / "empty.png").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_prompt_counts_what_is_attached() -> None:
    attached = Attachments()
    assert attached.prompt == "> "
    attached.command("/image cat.png")
    attached.command("/video   film.mp4")
    attached.command("/image cat.png")
    assert attached.prompt == "[2 images, 1 video] > "
    assert attached.take() == [Image("cat.png"), Video("film.mp4"), Image("cat.png")]
    assert (attached.prompt, attached.take()) == ("> ", [])


def test_what_a_failed_message_had_comes_first_again() -> None:
    attached = Attachments([Image("cat.png")])
    taken = attached.take()
    attached.command("/video film.mp4")
    attached.put_back(taken)
    assert attached.take() == [Image("cat.png"), Video("film.mp4")]


@pytest.mark.parametrize(
    ("typed", "source"),
    [
        ("it's a dog.png", "it's a dog.png"),
        ("'cat.png'", "cat.png"),
        ('"cat.png" ', "cat.png"),
        (r"it\'s\ a\ dog.png", "it's a dog.png"),
        ("https://example.org/a b.png", "https://example.org/a b.png"),
    ],
)
def test_paths_may_be_quoted_as_terminals_do(typed: str, source: str) -> None:
    attached = Attachments()
    attached.command(f"/image {typed}")
    assert attached.take() == [Image(source)]


def test_home_is_expanded(files: Path) -> None:
    attached = Attachments()
    said = attached.command("/image ~/cat.png")
    assert said == f"Attached: image {files}/cat.png, 3 bytes. It goes with your next message."


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/image no.png", "error: no.png can't be sent: there is no such file"),
        ("/image empty.png", "error: empty.png can't be sent: the file is empty"),
        ("/video .", "error: . can't be sent: it is a directory, not a file"),
        ("/image it's not there.png", "error: it's not there.png can't be sent: there is no such"),
        ("/image", "Nothing is attached; /image FILE attaches a picture to your next message."),
        ("/detach", "Nothing was attached."),
    ],
)
def test_what_is_not_attached_is_explained(line: str, said: str) -> None:
    attached = Attachments()
    assert (attached.command(line) or "").startswith(said)
    assert attached.take() == []


def test_the_list_shows_kinds_names_and_sizes() -> None:
    attached = Attachments([Image("it's a dog.png"), Video("film.mp4"), Image("https://x/y.png")])
    assert attached.command("/image") == (
        "1. image it's a dog.png, 1.5 KiB\n2. video film.mp4, 3.0 MiB\n3. image https://x/y.png"
    )
    assert attached.command("/detach") == "Nothing is attached any more."
    assert attached.take() == []


def test_other_commands_are_not_its_own() -> None:
    assert Attachments().command("/images cat.png") is None
    assert Attachments().command("/new") is None


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("/im", ["/image"]),
        ("/", ["/image", "/new"]),
        ("/image c", ["at.png"]),
        ("/video ~/fi", ["lm.mp4"]),
        ("im", []),
        ("What is /image c", []),
    ],
)
def test_commands_and_paths_are_completed(line: str, completed: list[str]) -> None:
    completer = ChatCompleter(["/image", "/new"])
    found = completer.get_completions(Document(line), CompleteEvent(completion_requested=True))
    assert [completion.text for completion in found] == completed
