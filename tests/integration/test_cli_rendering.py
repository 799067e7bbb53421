"""`millstream render` and `millstream parse`, as pipes use them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millstream_server.engines.simulated.engine import SimulatedConfig
from millstream_server.engines.simulated.speech import Speech
from millstream_server.processor.text.tokenizer import TextModel
from millstream_testing.in_process import suite
from tests.support.processes.command_line import MILLSTREAM, millstream

PAGE = Path("docs/client.md").read_text(encoding="utf-8")
MODEL = Path("demo/model")
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
SAID = f"<think>Hm.</think>Let me see.{CALL}"


@pytest.fixture
async def address() -> AsyncIterator[str]:
    model, speech = TextModel.load(MODEL), Speech.load(MODEL)
    assert speech is not None
    config = SimulatedConfig(vocab_size=4096, speech=speech, eos_token_id=speech.end)
    async with suite(model, config) as (front, _):
        yield front.address


async def test_a_prompt_and_its_answer_go_through_pipes(address: str, tmp_path: Path) -> None:
    tools, prompt = tmp_path / "tools.json", tmp_path / "prompt.json"
    tools.write_text('[{"name": "clock"}]', encoding="utf-8")
    asked = ("render", "What", "time?", "--tools", str(tools), "--address", address)
    shown = await millstream(*asked)
    told = await millstream(*asked, "--json")
    assert (shown.code, told.code, shown.err + told.err) == (0, 0, "")
    prompt.write_text(told.out, encoding="utf-8")
    found = json.loads(told.out)
    assert found["prompt"] == shown.out
    assert "What time?" in shown.out
    model = TextModel.load(MODEL)
    assert found["token_ids"] == list(model.encode(shown.out, add_special_tokens=False))
    reading = ("parse", "--reading", str(prompt), "--address", address)
    plain = await millstream(*reading, stdin=SAID)
    assert (plain.code, plain.out, plain.err) == (0, "Let me see.", "Hm.\n→ clock {}\n")
    ids = json.dumps(list(model.encode(SAID, add_special_tokens=False)))
    whole = json.loads((await millstream(*reading, "--ids", "--json", stdin=ids)).out)
    (call,) = whole.pop("tool_calls")
    assert (call["name"], call["arguments_json"], call["incomplete"]) == ("clock", "{}", False)
    assert whole.pop("reasoning_tokens") > 0
    assert whole == {"reasoning": "Hm.", "text": "Let me see."}


async def test_the_commands_of_the_page(address: str, tmp_path: Path) -> None:
    (script,) = re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    shell = await asyncio.create_subprocess_exec(
        *("bash", "-ec", f'millstream() {{ {shlex.join(MILLSTREAM)} "$@"; }}\n{script}'),
        cwd=tmp_path,
        env=os.environ | {"MILLSTREAM_ADDRESS": address},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await shell.communicate()
    assert (shell.returncode, out, err) == (0, b"A mill.\n", b"Hm.\n")


async def test_a_conversation_comes_from_a_file(address: str, tmp_path: Path) -> None:
    file = tmp_path / "said.json"
    said = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}]
    file.write_text(json.dumps([*said, {"role": "user", "content": "C"}]), encoding="utf-8")
    done = await millstream("render", "--messages", str(file), "--address", address)
    assert (done.code, done.err) == (0, "")
    assert [done.out.index(text) for text in "ABC"] == sorted(done.out.index(t) for t in "ABC")


@pytest.mark.parametrize(
    ("command", "stdin", "sentence"),
    [
        (("render",), "", "give a QUESTION, or a conversation by --messages FILE"),
        (("parse", "--ids"), "hello", "--ids needs a JSON list of token ids"),
        (("parse", "--format", "morse"), "hello", "INVALID_ARGUMENT"),
    ],
)
async def test_what_is_wrong_is_said(
    address: str, command: tuple[str, ...], stdin: str, sentence: str
) -> None:
    done = await millstream(*command, "--address", address, stdin=stdin)
    assert (done.code, done.out) == (1, "")
    assert sentence in done.err


async def test_a_file_of_something_else_is_named(tmp_path: Path) -> None:
    file = tmp_path / "prompt.json"
    file.write_text("[]", encoding="utf-8")
    done = await millstream("parse", "--reading", str(file))
    assert done.code == 2
    assert f"can't use {file}: it isn't what `render --json` prints" in done.err
