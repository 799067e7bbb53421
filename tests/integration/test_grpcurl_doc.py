"""docs/grpcurl.md: its commands are pasted into one shell, in order, and print what it says."""

from __future__ import annotations

import re

import pytest

from tests.support.deploy.deploy_tools import tool
from tests.support.docs.pasted_page import ROOT, PastedPage, expect_in_order

pytestmark = pytest.mark.timeout(240)  # half a minute of commands, beside other tests

_UP = {
    "encode-1": ("50081", "9465", "9565"),
    "prefill-1": ("50061", "9466", "9566"),
    "decode-1": ("50071", "9467", "9567"),
    "image-1": ("50091", "9468", "9568"),
    "dllm-1": ("50092", "9469", "9569"),
    "embedding-1": ("50101", "9470", "9570"),
    "reranker-1": ("50102", "9471", "9571"),
    "processor": ("50051", "9464", "9564"),
}
_SAYS = {
    "The suite": [r"Ready after \d", r"^encode-1 ", r"^processor "],
    "Look around": [
        r"^grpc.reflection.v1.ServerReflection$",
        r"rpc Chat \( stream .millstream.v1.ChatRequest \)",
        r"optional float temperature = 1;",
        r"Message template:",
        r'"name": "demo-dllm",\s+"ready": true',
        r'"MODEL_TASK_CHAT"',
    ],
    "Text": [
        r'"started": \{\s+"requestId": "req-',
        r'"finishReason": "FINISH_REASON_LENGTH"',
        r'"promptTokens": 12,\s+"completionTokens": 3',
        r'"turn": 1,\s+"finishReason": "FINISH_REASON_CANCELLED"\s+"turn": 2',
        r'"finishReason": "FINISH_REASON_LENGTH"',
        r'"promptTokens": 125,\s+"completionTokens": 3,\s+"mediaTokens": 108',
        r'"finishReason": "FINISH_REASON_LENGTH"',
        r'"finishReason": "FINISH_REASON_LENGTH"',
        r'"tokenIds": \[\s+1472',
        r'"text": "Hello"',
        r'"renderedPrompt": "\\u003c\|im_start',
        r'"stopTokenIds": \[',
        r'"reasoning": "The time\?"',
        r'"name": "clock"',
        r'"finished": \{\s+"toolCalls": \[',
    ],
    "Connect and gRPC-web": [
        r'^\{"tokenIds": \[1472\], "contextLength": 8192\}\n200$',
        r'"code":"not_found",.*"reason":"MODEL_NOT_FOUND".*\n404$',
        r"^FINISH_REASON_LENGTH\nFINISH_REASON_LENGTH\nFINISH_REASON_LENGTH$",
        r'"message": "start: must be set"',
    ],
    "Errors, deadlines, keys": [
        r"Code: InvalidArgument",
        r"Message: options.sampling.top_p: must be above 0 and at most 1",
        r'"reason":"INVALID_REQUEST"',
        r'"field":"options.sampling.top_p"',
        r"^exit code 67$",
        r"^authorization: Bearer",
        r'"tokenIds": \[',
    ],
    "Images and videos": [
        r'"last": true\s+"seed": "7",\s+"seed": "7",\s+"mediaType": "image/png"\s+PNG$',
        r'"message": "model: no model here makes videos"',
        r'"reason": "FINISH_REASON_LENGTH"',
    ],
    "Vectors and rankings": [r'"dimensions": 16,\s+"values": "', r'"score": 0\.\d+'],
    "Health": [
        r'"status": "SERVING"',
        r'"status": "SERVING"',
        r'"accepting": \{\s+"status": "SERVING"',
        r'"status": "SERVING"\s+\}\s+ERROR:\s+Code: DeadlineExceeded',
    ],
    "Workers": [
        r'"role": "WORKER_ROLE_DECODE"',
        r'"role": "WORKER_ROLE_DECODE"',
        r'"load": \{\s+"totalBlocks": "\d+"',
        r'"stage": "LOAD_STAGE_READY"',
        r'"logId": "\w{16}"',
        r'"snapshot": \{\s+"first": true',
        r'"snapshot": \{\s+"first": true',
    ],
    "Generate at a worker": [
        r'"tokenIds": \[',
        r'"reason": "FINISH_REASON_LENGTH"',
        r'"message": "ticket: a prefill worker needs one"',
        r'"message": "ticket: a decode worker needs one"',
    ],
    "Encode": [
        r'"tokens": 108',
        r'"leaseLeft": "299',
        r"Message: start.ticket.content: is not one",
    ],
    "Load reports": [r'"applicationUtilization": 0.01'],
    "Admin and channelz": [
        r'"pid": \d+',
        r'"previousLevel": "LOG_LEVEL_INHERIT"',
        r'"previousLevel": "LOG_LEVEL_DEBUG"',
        r'"calls_started"',
        r'"state": "READY"\s+"target": "dns:///127.0.0.1:\d+"',
    ],
    "Engine control": [
        r'"supported": \[\s+"Drain"',
        r'"stage": "OPERATION_STAGE_DONE"',
        r'"wasDrained": true',
        r'"wasPaused": true',
        r'"released": \[\s+"MEMORY_TAG_KV_CACHE"\s+\]',
        r'"resumed": \[\s+"MEMORY_TAG_KV_CACHE"\s+\]',
        r'"weightVersion": "v2"',
        r"Message: start.disk.path: must be below a directory that the worker's --weights-dirs",
        r'"adapter": \{\s+"name": "sql",\s+"path": "/.*/sql",\s+"rank": 8',
        r'"adapters": \[\s+\{\s+"name": "sql"',
        r'"directory": "/',
        r'"path": "/.*\.json"',
    ],
    "With buf": [
        r"^millstream.v1.ProcessorService/Chat$",
        r'"tokenIds": \[\s*1472',
        r"^exit code 0$",
    ],
}
"""What each section's commands print, in order."""


@pytest.fixture(scope="module")
def page() -> PastedPage:
    programs = (tool("grpcurl").parent,)
    return PastedPage("grpcurl.md", _UP, own_ports=("50171",), programs=programs)


@pytest.fixture(scope="module")
def printed(page: PastedPage, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return page.run(tmp_path_factory.mktemp("checkout"))


@pytest.mark.parametrize("section", list(_SAYS))
def test_a_sections_commands_print_what_it_says(printed: dict[str, str], section: str) -> None:
    expect_in_order(printed[section], _SAYS[section])


def test_every_section_with_commands_is_checked(page: PastedPage) -> None:
    assert page.sections() == list(_SAYS)


def test_every_rpc_of_the_contract_is_called(page: PastedPage) -> None:
    commands = "\n".join(block for _, block in page.blocks())
    for proto in sorted((ROOT / "proto" / "millstream" / "v1").glob("*.proto")):
        service = ""
        for kind, name in re.findall(r"^ *(service|rpc) (\w+)", proto.read_text(), re.MULTILINE):
            service = name if kind == "service" else service
            assert kind == "service" or f"{service}/{name}" in commands
