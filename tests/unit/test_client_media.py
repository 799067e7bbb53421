"""Images and videos in requests: parts, files, what goes ahead in chunks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from millstream.v1 import chat_pb2, media_pb2, processor_pb2
from millstream_client import (
    Image,
    MediaFileError,
    MediaMessage,
    Video,
    assistant,
    tool_result,
    user,
)
from millstream_client.media import Part, attached
from millstream_client.requests import messages, question
from millstream_client.writing import CHUNK_BYTES, INLINE_BYTES, take_uploads

MIB = 1 << 20


def _image(data: bytes) -> chat_pb2.ContentPart:
    return chat_pb2.ContentPart(image=media_pb2.Media(data=data))


def _start(*sizes: int) -> processor_pb2.ChatRequest:
    content = [_image(bytes([i]) * size) for i, size in enumerate(sizes)]
    message = chat_pb2.ChatMessage(role=chat_pb2.CHAT_ROLE_USER, content=content)
    return processor_pb2.ChatRequest(start=processor_pb2.ChatStart(messages=[message]))


# ---- parts


def test_parts_keep_their_order(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"a")
    made = user("Left:", Image(tmp_path / "a.png"), "film:", Video(b"v"), Image("HTTPS://x/y.png"))
    assert isinstance(made, MediaMessage)
    assert made.read() == chat_pb2.ChatMessage(
        role=chat_pb2.CHAT_ROLE_USER,
        content=[
            chat_pb2.ContentPart(text="Left:"),
            _image(b"a"),
            chat_pb2.ContentPart(text="film:"),
            chat_pb2.ContentPart(video=media_pb2.Media(data=b"v")),
            chat_pb2.ContentPart(image=media_pb2.Media(url="HTTPS://x/y.png")),
        ],
    )


def test_a_tool_may_return_an_image() -> None:
    made = tool_result("c1", "a chart:", Image(bytearray(b"p")))
    assert isinstance(made, MediaMessage)
    read = made.read()
    assert (read.role, read.tool_call_id) == (chat_pb2.CHAT_ROLE_TOOL, "c1")
    assert read.content[1] == _image(b"p")


def test_media_stands_before_the_questions_text() -> None:
    media = attached("a.png", [b"2", Image("https://x/3")], Video("v.mp4"), [])
    assert [repr(item) for item in media] == [
        "Image('a.png')",
        "Image(<1 bytes>)",
        "Image('https://x/3')",
        "Video('v.mp4')",
    ]
    made = question("What is it?", media[:1])
    assert made == MediaMessage(chat_pb2.CHAT_ROLE_USER, (Image("a.png"), "What is it?"))
    assert question("", media[:1]) == MediaMessage(chat_pb2.CHAT_ROLE_USER, (Image("a.png"),))
    assert question("") == user("")


def test_a_path_given_for_several_is_one() -> None:
    more: Any = "cat.png"
    assert attached(None, more, None, []) == [Image("cat.png")]


def test_a_list_is_one_message_or_a_conversation() -> None:
    content: list[Part] = ["What is it?", Image(b"i")]
    parts = messages(content, "S")
    assert [m.role for m in parts] == [chat_pb2.CHAT_ROLE_SYSTEM, chat_pb2.CHAT_ROLE_USER]
    assert messages(["one", "two"]) == [user("one", "two")]
    assert messages([user("one"), assistant("two")]) == [user("one"), assistant("two")]
    assert messages([]) == []


def test_media_beside_a_conversation_is_refused_with_what_to_write() -> None:
    with pytest.raises(TypeError, match=r"user\('What is this\?', Image\('cat\.png'\)\)"):
        messages([user("hi")], None, [Image(b"i")])


@pytest.mark.parametrize("said", [[user("hi"), 5], [5], ["hi", user("hi")]], ids=str)
def test_other_things_in_a_list_are_refused_at_once(said: Any) -> None:
    with pytest.raises(TypeError, match=r"Image or a Video|a list of messages has a"):
        messages(said)


def test_a_source_of_another_type_is_refused_at_once() -> None:
    source: Any = 5
    with pytest.raises(TypeError, match="Image takes a file's path, its bytes or a URL, not int"):
        Image(source)


def test_bytes_are_not_printed() -> None:
    assert repr(Image(b"x" * 5000)) == "Image(<5000 bytes>)"
    assert repr(Video("data:video/mp4;base64,AAAA")) == "Video(<data: URL of 26 characters>)"


# ---- files


def _sentence(source: Any) -> str:
    for act in (Image(source).check, Image(source).read):
        with pytest.raises(MediaFileError) as caught:
            act()
    return caught.value.message


def test_a_file_that_cannot_be_sent_is_a_sentence(tmp_path: Path) -> None:
    missing, empty, pipe = tmp_path / "no.png", tmp_path / "empty.png", tmp_path / "pipe"
    empty.touch()
    os.mkfifo(pipe)
    assert _sentence(missing) == f"{missing} can't be sent: there is no such file"
    assert _sentence(empty / "x.png") == f"{empty}/x.png can't be sent: there is no such file"
    assert _sentence(tmp_path) == f"{tmp_path} can't be sent: it is a directory, not a file"
    assert _sentence(str(empty)) == f"{empty} can't be sent: the file is empty"
    assert _sentence(pipe) == f"{pipe} can't be sent: it is a pipe or a device, not a file"
    assert _sentence("a\0b") == "a\0b can't be sent: it can't be read (embedded null byte)"
    assert _sentence(b"") == "the bytes of the image are empty"


def test_a_file_far_too_large_is_not_read(tmp_path: Path) -> None:
    huge = tmp_path / "huge.mp4"
    with huge.open("wb") as file:
        file.truncate((1 << 30) + 1)
    assert _sentence(huge).endswith("it has 1073741825 bytes; at most 1073741824 can be sent")


def test_a_file_that_cannot_be_opened_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(b"a")

    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(MediaFileError, match=r"it can't be read \(Permission"):
        Image(tmp_path / "a.png").read()


# ---- what goes ahead in chunks


def test_small_files_stay_in_the_message() -> None:
    request = _start(INLINE_BYTES // 2, INLINE_BYTES // 2)
    before = request.SerializeToString(deterministic=True)
    assert take_uploads(request) == []
    assert request.SerializeToString(deterministic=True) == before


def test_what_does_not_fit_goes_ahead() -> None:
    request = _start(10, INLINE_BYTES, 2 * CHUNK_BYTES + 5, 20)
    big, bigger = take_uploads(request)
    small, first, second, last = (part.image for part in request.start.messages[0].content)
    assert (small.data, last.data) == (b"\0" * 10, b"\3" * 20)
    assert (first.upload_id, second.upload_id) == (big.id, bigger.id)
    assert (first.data, len(big.id), big.id != bigger.id) == (b"", 32, True)
    chunks = [message.media_chunk for message in bigger.chunks()]
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 5]
    assert [chunk.total_bytes for chunk in chunks] == [2 * CHUNK_BYTES + 5, 0, 0]
    assert {chunk.upload_id for chunk in chunks} == {bigger.id}
    assert b"".join(chunk.data for chunk in chunks) == b"\2" * (2 * CHUNK_BYTES + 5)


def test_ids_differ_each_time() -> None:
    assert take_uploads(_start(2 * MIB))[0].id != take_uploads(_start(2 * MIB))[0].id


@pytest.mark.parametrize(
    "request_",
    [
        processor_pb2.ChatRequest(
            user_turn=processor_pb2.UserTurn(content=[_image(b"0" * 2 * MIB)])
        ),
        processor_pb2.ChatRequest(
            tool_results=processor_pb2.ToolResults(
                messages=[chat_pb2.ChatMessage(content=[_image(b"0" * 2 * MIB)])]
            )
        ),
    ],
    ids=["user_turn", "tool_results"],
)
def test_every_kind_of_turn_may_have_files(request_: processor_pb2.ChatRequest) -> None:
    (upload,) = take_uploads(request_)
    assert len(upload.data) == 2 * MIB
    assert request_.ByteSize() < 100


def test_a_message_without_files_has_nothing_to_send_ahead() -> None:
    cancel = processor_pb2.ChatRequest(cancel=processor_pb2.CancelTurn())
    assert take_uploads(cancel) == []
