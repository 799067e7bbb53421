"""The commands that `up` prints: they parse as a shell and the contract read them."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from rich.console import Console

from millstream.v1 import decode_pb2, encode_pb2, media_pb2, processor_pb2
from millstream_client import Image
from millstream_server.cli.flags import DEFAULT_LOG_DIR
from millstream_server.cli.main import make_parser
from millstream_server.cli.suite.display import examples, operating, print_ready
from millstream_server.cli.suite.models import FurtherModel, Task
from millstream_server.cli.suite.plan import PortClaims, SuitePlan, UpOptions, make_plan
from tests.support.processes.stand_in import write_vision_config

_REQUESTS: dict[str, type[Message]] = {
    "ProcessorService/Chat": processor_pb2.ChatRequest,
    "EncodeService/Encode": encode_pb2.EncodeRequest,
    "DecodeService/Decode": decode_pb2.DecodeRequest,
}


@pytest.fixture(params=["disaggregated", "aggregated"])
def plan(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SuitePlan]:
    write_vision_config(tmp_path)
    with PortClaims() as ports:
        options = UpOptions(model=tmp_path, model_name="m", topology=request.param, encode=1)
        yield make_plan(options, ports)


def _requests(lines: list[str]) -> list[tuple[str, str, Any]]:
    """Return tool, method and request of each line that calls a method."""
    found = []
    for line in lines:
        if method := re.search(r"millstream\.v1\.(\w+/\w+)$", line):
            words = shlex.split(line)
            data = words[words.index("-d") + 1]
            request = json_format.Parse(data, _REQUESTS[method[1]]())
            found.append((Path(words[0]).name, method[1], request))
    return found


def _flags(line: str) -> argparse.Namespace:
    return make_parser().parse_args(shlex.split(line)[1:])


def test_the_first_chat_is_about_a_picture(
    plan: SuitePlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = Path.cwd() / "some where" / "red.png"
    monkeypatch.setattr("millstream_server.cli.suite.display.demo_picture", lambda: picture)
    once, chat, *_ = map(_flags, examples(plan)[:2])
    assert once.media == [Image("some where/red.png")]
    assert once.question == ["What is in this picture?"]
    assert (chat.media, chat.question) == ([], [])
    assert chat.address == plan.processor.client_address


def test_requests_fit_the_contract_and_hold_a_picture(plan: SuitePlan) -> None:
    found = _requests(examples(plan))
    called = [("buf", "ProcessorService/Chat")]
    called += [(tool, "EncodeService/Encode") for tool in ("buf", "grpcurl")]
    if plan.options.topology == "aggregated":
        called += [("buf", "DecodeService/Decode")]
    assert [(tool, method) for tool, method, _ in found] == called
    (_, _, chat), (_, _, encode), (_, _, same), *_ = found
    assert encode == same
    item = encode.start
    assert (item.modality, item.total_bytes) == (media_pb2.MODALITY_IMAGE, len(item.data))
    assert chat.start.messages[0].content[0].image.data == item.data
    with PIL.Image.open(io.BytesIO(item.data)) as picture:
        assert picture.size == (64, 64)
        rgb = picture.convert("RGB")
        assert (rgb.getpixel((32, 32)), rgb.getpixel((0, 0))) == ((220, 40, 40), (255, 255, 255))


def test_without_encode_workers_the_chat_is_text(plan: SuitePlan) -> None:
    text = SuitePlan(replace(plan.options, encode=0), plan.services[1:])
    lines = examples(text)
    assert _flags(lines[0]).question == ["What is Millstream?"]
    methods = [method for _, method, _ in _requests(lines)]
    assert methods[0] == "ProcessorService/Chat"
    assert "EncodeService/Encode" not in methods


def test_each_further_model_has_a_command(plan: SuitePlan, tmp_path: Path) -> None:
    further = tuple(FurtherModel(task, tmp_path, f"demo-{task.value}") for task in Task)
    lines = examples(SuitePlan(replace(plan.options, further=further), plan.services))
    commands = [_flags(line).run.__name__ for line in lines if "curl" not in line]
    assert commands == ["run", "run", "_run", "run", "_run_embed", "_run_rerank"]
    assert _flags(lines[0]).model == "", "the default, though two models can chat"
    assert _flags(lines[3]).model == "demo-dllm"


@pytest.mark.parametrize("log_dir", [DEFAULT_LOG_DIR, Path("other logs")])
def test_what_watches_and_operates_the_suite_finds_it(plan: SuitePlan, log_dir: Path) -> None:
    lines = operating(SuitePlan(replace(plan.options, log_dir=log_dir), plan.services))
    top, admin = map(_flags, lines)
    assert (top.log_dir, top.workers) == (log_dir, "")
    assert (admin.log_dir, admin.all, admin.admin_command.name) == (log_dir, True, "status")
    assert ("--log-dir" in lines[0]) is (log_dir != DEFAULT_LOG_DIR)


@pytest.mark.parametrize(("engine", "says"), [("sglang", True), ("diffusers", False)])
def test_what_listens_on_all_interfaces_is_said(
    plan: SuitePlan,
    engine: str,
    says: bool,  # noqa: FBT001
) -> None:
    images = FurtherModel(Task.IMAGE, plan.options.model, "draw", image_engine=engine)
    drawing = SuitePlan(replace(plan.options, further=(images,)), plan.services)
    console = Console(file=io.StringIO(), record=True)
    print_ready(console, drawing, [], 1.0)
    assert ("listens on all interfaces" in console.export_text()) is says
