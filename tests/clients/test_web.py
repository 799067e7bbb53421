"""gRPC-web and Connect by the clients that browsers have: connect-web, grpc-web; and connect-node.

One program makes the same calls by each of them, and prints what it got.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.alphabet import alphabet_model
from millstream_testing.in_process import ALPHABET, MODEL, processor, worker
from tests.support.clients.client_builds import ROOT, built, need, run

_PROGRAMS = Path(__file__).with_name("web")
_INSTALLED = _PROGRAMS / "node_modules"
_DESCRIPTORS = ROOT / "generated" / "descriptors" / "millstream.binpb"
_CONFIG = replace(ALPHABET, context_length=8192, step_s=0.002)
CONNECT = [
    "connectNode1",
    "connectNode2",
    "connectNode2Json",
    "grpcWebNode1",
    "grpcWebNode2Json",
    "grpcNode",
    "connectWeb",
    "connectWebJson",
    "grpcWebWeb",
]
DUPLEX = ["connectNode2", "connectNode2Json", "grpcNode"]
GRPC_WEB = ["grpcWebText", "grpcWebBinary"]

# Five seconds on two idle cores.
pytestmark = pytest.mark.timeout(120)


def _build(folder: Path) -> None:
    for name in ("package.json", "buf.gen.yaml", "ask.mjs", "calls.mjs", "request.mjs"):
        shutil.copy(_PROGRAMS / name, folder)
    (folder / "node_modules").symlink_to(_INSTALLED)
    run(["buf", "generate", "--template", "buf.gen.yaml", ROOT / "proto"], folder)


@pytest.fixture(scope="module")
def got(tmp_path_factory: pytest.TempPathFactory) -> Any:
    need("node", _INSTALLED)
    sources = [*(each for each in _PROGRAMS.iterdir() if each.is_file()), ROOT / "proto"]
    folder = built("web", sources, _build)
    model = TextModel.load(alphabet_model(tmp_path_factory.mktemp("model")))
    return asyncio.run(_calls(folder / "calls.mjs", model))


async def _calls(program: Path, model: TextModel) -> Any:
    async with worker(_CONFIG) as one, processor({MODEL: model}, [one.address]) as front:
        calling = await asyncio.create_subprocess_exec(
            *("node", program, f"http://{front.address}", _DESCRIPTORS, MODEL),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, complained = await calling.communicate()
        assert calling.returncode == 0, complained.decode()
        await one.until_idle(5.0)  # what was cancelled, and what had a deadline
    return json.loads(said)


@pytest.mark.parametrize("client", [*CONNECT, *GRPC_WEB])
def test_unary_calls_and_streams(got: Any, client: str) -> None:
    assert got[client]["unary"] == 5
    if client != "grpcWebBinary":
        assert got[client]["stream"]["text"] == got["grpcNode"]["stream"]["text"] != ""


@pytest.mark.parametrize("client", CONNECT)
def test_errors_have_their_details(got: Any, client: str) -> None:
    found = got[client]
    top_p = "options.sampling.top_p"
    assert (found["error"]["code"], found["error"]["fields"]) == ("InvalidArgument", [top_p])
    assert found["error"]["message"] == f"{top_p}: must be above 0 and at most 1"
    assert found["unaryError"]["fields"] == ["input"]
    assert (found["missing"]["code"], found["missing"]["fields"]) == ("NotFound", [])


@pytest.mark.parametrize("client", CONNECT)
def test_a_call_is_cancelled_and_has_a_deadline(got: Any, client: str) -> None:
    assert got[client]["cancel"]["code"] == "Canceled"
    assert got[client]["deadline"]["code"] == "DeadlineExceeded"


@pytest.mark.parametrize("client", DUPLEX)
def test_a_chat_of_two_turns_in_one_call(got: Any, client: str) -> None:
    assert got[client]["turns"] == [1, 2]


def test_grpc_web_s_own_client(got: Any) -> None:
    text = got["grpcWebText"]
    assert (text["cancel"], text["deadline"]["code"]) == ("cancelled", 4)
    for client in GRPC_WEB:
        error = got[client]["error"]
        assert (error["code"], error["details"]) == (3, True)
        assert error["message"] == "input: set one of text, conversation"


def test_the_program_of_the_page_for_browsers(got: Any) -> None:
    assert got["page"] == {"text": True, "tokens": 100}
    page = (ROOT / "docs" / "browsers.md").read_text()
    for name in ("ask.mjs", "buf.gen.yaml"):
        assert (_PROGRAMS / name).read_text() in page
