"""`millstream admin update-weights`: the tensors of files, and other sources."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from millstream.v1 import engine_control_pb2
from millstream_server.cli.admin.requests import CHUNK_BYTES
from millstream_server.runtime.errors import InvalidWeightsError
from tests.support.worker.scripted_admin import DONE, Script, admin, control


def _safetensors(path: Path, **tensors: tuple[str, list[int], bytes]) -> Path:
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


async def test_tensors_are_sent_in_chunks(tmp_path: Path) -> None:
    large = os.urandom(CHUNK_BYTES + 2)
    one = _safetensors(tmp_path / "1.st", a=("BF16", [len(large) // 2], large))
    two = _safetensors(tmp_path / "2.st", b=("F32", [1, 2], b"12345678"))
    sent = ("--weight-version", "v2", "--safetensors", str(one), str(two))
    async with control(UpdateWeights=[{"progress": DONE}]) as served:
        assert await admin("update-weights", *sent, "--admin", served.address) == 0
    start, *messages = served.received
    assert start.start.tensors.total_bytes == len(large) + 8  # type: ignore[attr-defined]
    kinds = [message.WhichOneof("message") for message in messages]
    assert kinds == ["tensor", "chunk", "chunk", "tensor", "chunk"]
    found: dict[str, bytes] = {}
    for message in map(engine_control_pb2.UpdateWeightsRequest.FromString, _wire(messages)):
        if message.HasField("tensor"):
            name = message.tensor.name
            found[name] = b""
        else:
            assert message.chunk.offset == len(found[name])
            found[name] += message.chunk.data
    assert found == {"a": large, "b": b"12345678"}
    specs = [json_format.MessageToDict(messages[at])["tensor"]["spec"] for at in (0, 3)]
    assert specs == [
        {"elementType": "ELEMENT_TYPE_BFLOAT16", "shape": [len(large) // 2]},
        {"elementType": "ELEMENT_TYPE_FLOAT32", "shape": [1, 2]},
    ]


def _wire(messages: Sequence[Message]) -> list[bytes]:
    return [message.SerializeToString() for message in messages]


async def test_a_refusal_while_tensors_are_sent_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytes(8 * CHUNK_BYTES)
    file = _safetensors(tmp_path / "1.st", a=("F16", [len(data) // 2], data))
    async with control(UpdateWeights=InvalidWeightsError("a has another shape")) as served:
        served.wants = 2
        sent = ("--weight-version", "v2", "--safetensors", str(file))
        assert await admin("update-weights", *sent, "--admin", served.address) == 1
    assert capsys.readouterr().err.splitlines() == [
        f"{served.address}: error: FAILED_PRECONDITION (INVALID_WEIGHTS): a has another shape",
        "  -> the old weights serve on",
    ]


async def test_broadcasts_have_a_rank_for_each_worker(tmp_path: Path) -> None:
    file = _safetensors(tmp_path / "1.st", a=("BF16", [1], b"12"), b=("F32", [1], b"1234"))
    source = ("--broadcast", "trainer:29500", "--tensors", str(file), "--world-size", "3")
    done: Script = [{"progress": DONE}]
    async with control(UpdateWeights=done) as one, control(UpdateWeights=done) as two:
        both = ("--admin", one.address, "--admin", two.address)
        command = ("update-weights", "--weight-version", "v2", *source, "--backend", "gloo")
        assert await admin(*command, "--rank-offset", "1,2", *both) == 0
    for served, rank in ((one, 1), (two, 2)):
        (request,) = served.received
        sent = json_format.MessageToDict(request)["start"]["broadcast"]
        assert [tensor["name"] for tensor in sent.pop("tensors")] == ["a", "b"]
        assert sent == {
            "masterAddress": "trainer:29500",
            "rankOffset": rank,
            "worldSize": 3,
            "groupName": "weights",
            "backend": "gloo",
        }


async def test_senders_on_gpus_are_named_by_uuid() -> None:
    async with control(UpdateWeights=[{"progress": DONE}]) as served:
        ipc = ("--ipc", "GPU-1=ipc:///tmp/a", "--ipc", "GPU-2=ipc:///tmp/b")
        command = ("update-weights", "--weight-version", "v2", *ipc)
        assert await admin(*command, "--admin", served.address) == 0
    sent = served.received[0].start.ipc.zmq_addresses  # type: ignore[attr-defined]
    assert dict(sent) == {"GPU-1": "ipc:///tmp/a", "GPU-2": "ipc:///tmp/b"}


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (
            "--safetensors {folder}/none",
            "none can't be read: No such file",
        ),
        (
            "--safetensors {folder}/int.st",
            "w is I64; F32, BF16, F16 can be sent. Give such a checkpoint by --path",
        ),
        (
            ("--safetensors {folder}/w.st {folder}/w.st --admin a:1"),
            "w is in {folder}/w.st and again in {folder}/w.st",
        ),
        (
            "--broadcast t:1",
            "--broadcast needs --tensors, --rank-offset and --world-size",
        ),
        (
            ("--broadcast t:1 --tensors {folder}/w.st --world-size 3 --rank-offset 1 --admin b:1"),
            "--rank-offset names 1 ranks for 2 workers",
        ),
        ("--ipc gpu", "'gpu' is not UUID=ADDRESS"),
        (
            "--path p --world-size 2",
            "are for --broadcast",
        ),
    ],
)
async def test_sources_are_checked_before_anything_is_sent(
    args: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _safetensors(tmp_path / "int.st", w=("I64", [1], bytes(8)))
    _safetensors(tmp_path / "w.st", w=("F32", [1], bytes(4)))
    words = args.format(folder=tmp_path).split()
    assert await admin("update-weights", "--weight-version", "v", *words, "--admin", "a:1") == 2
    assert why.format(folder=tmp_path) in capsys.readouterr().err
