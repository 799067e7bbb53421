"""docs/structured-output.md: its snippets and commands run as they stand, on SGLang."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.deploy.deploy_tools import tool
from tests.support.docs.pasted_page import ROOT, expect_in_order
from tests.support.processes.suite import ServiceProcess, running

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(420)]

_PAGE = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
_BLOCKS = re.findall(r"^```(python|sh)\n(.*?)^```", _PAGE, re.MULTILINE | re.DOTALL)
_SAYS = {
    "class Review(BaseModel)": [r"^(True|False) [1-5]$"],
    "AnswerFormatError": [r"^ANSWER_CUT_OFF the answer was cut off after 2 tokens"],
    "Constraint(regex=": [r"^(yes|no)$"],
    "--json-schema": [
        r'^\{\s*"good"\s*:\s*(true|false)\s*\}$',
        r"^(yes|no)$",
        r"^from (Rome|Oslo) to (Rome|Oslo)$",
    ],
    "grpcurl": [r'"finishReason": "FINISH_REASON_STOP"'] * 2,
    "--regex '('": [
        r"--regex: the engine cannot compile this grammar",
        r"--json-schema: json_schema must not refer outside itself",
    ],
}
"""A word of each block, in the page's order, and what the block prints."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the demo model, with the flags of `millstream up --topology aggregated`."""
    logs, model = tmp_path_factory.mktemp("logs"), ROOT / "demo" / "model"
    decode = ServiceProcess(
        "millstream_server.decode",
        {"engine": "sglang", "model_path": model, "model_name": "demo", "engine_tokenizer": "true"},
        logs / "decode.log",
    )
    front = ServiceProcess(
        "millstream_server.processor",
        {"models": f"demo={model}", "workers": decode.address},
        logs / "processor.log",
    )
    with running(decode, front):
        yield front.address


@pytest.mark.parametrize(
    ("word", "language", "code"),
    [(word, *block) for word, block in zip(_SAYS, _BLOCKS, strict=True)],
    ids=list(_SAYS),
)
def test_a_block_prints_what_it_says(
    address: str, tmp_path: Path, word: str, language: str, code: str
) -> None:
    assert word in code
    code = code.replace("127.0.0.1:50051", address)
    command = [sys.executable, "-c", code]
    if language == "sh":
        function = f'millstream() {{ command millstream "$@" --address {address}; }}\n'
        command = ["bash", "-c", function + code]
    folders = [Path(sys.executable).parent, tool("grpcurl").parent, os.environ["PATH"]]
    printed = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join(map(str, folders))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    ).stdout
    expect_in_order(printed, _SAYS[word])
