"""docs/operations.md: its commands are pasted into one shell, in order, and do what it says."""

from __future__ import annotations

import re
import shutil

import pytest

from millstream_client import Options
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime.rpc import channel
from tests.support.docs.pasted_page import ROOT, PastedPage, expect_in_order

pytestmark = pytest.mark.timeout(240)  # a minute of commands, beside other tests

_CALLER = "b7ad6b7169203331"

_PROCESSOR = ProcessorSettings(models=(), workers=())
_PAGE = PastedPage(
    "operations.md",
    {
        "prefill-1": ("50061", "9465", "9565"),
        "decode-1": ("50071", "9466", "9566"),
        "processor": ("50051", "9464", "9564"),
    },
    own_ports=("4317", "50081", "50151", "50152", "50171"),
)

_SAYS = {
    "Start": [
        r"Ready after \d",
        r"service +address +metrics +admin +pid",
        r"decode-1 +127\.0\.0\.1:\d+ +:\d+ +:\d+ +\d+ +simulated, demo +\.millstream/logs/decode-1",
        r'"finishReason": "FINISH_REASON_LENGTH"',
    ],
    "A check": [
        r"^✓ connection: ",
        r"^✓ health: millstream.v1.ProcessorService is SERVING",
        r"^✓ reflection: \d+ services",
        r"^✓ models: demo \(1 prefill, 1 decode\)",
        r"^✓ model demo: chat: 8 tokens, through prefill and decode",
        r"^all 5 steps passed$",
    ],
    "Probes": [
        r'"status": "SERVING"',
        r'"liveness": \{\s+"status": "SERVING"',
        r'"millstream.v1.DecodeService": \{\s+"status": "SERVING"',
        r'"millstream.v1.WorkerService"',
        r'"status": "SERVING"\s+\}\s+\{\s+"code": "deadline_exceeded"',
        r"^127.0.0.1:\d+ millstream.v1.DecodeService: SERVING$",
        r"EncodeService: the server has no service of this name\nexit code 1$",
    ],
    "An error": [
        r'"code": "invalid_argument"',
        r'"message": "options.sampling.top_p: must be above 0 and at most 1"',
        r"google.rpc.ErrorInfo[^}]+Cg9JTlZBTElEX1JFUVVFU1QSDW1pbGxzdHJlYW0uaW8aEgoJ",
        r"google.rpc.BadRequest[^}]+CjcKFm9wdGlvbnMuc2FtcGxpbmcudG9wX3ASHW11c3Qg",
        r"INVALID_ARGUMENT INVALID_REQUEST again: False None\n",
        r"options.sampling.top_p - must be above 0 and at most 1\n",
        r"request=ops-1 trace_id=1{32} model=demo .* completion_tokens=3 .*outcome=LENGTH",
    ],
    "Load": [
        r'"name": "demo",\s+"ready": true',
        r'"role": "WORKER_ROLE_PREFILL",\s+"connected": 1',
        r'"load": \{\s+"totalBlocks": "\d+"',
        r'"sinceProgress": "[\d.]+s"',
        r'"snapshot": \{\s+"first": true',
        r'"stage": "LOAD_STAGE_READY"',
        r'"applicationUtilization": 0.01[^$]+"applicationUtilization": 0.01',
    ],
    "A table of workers": [
        r"^worker +role +health +run +queue +KV in use",
        r"^prefill-1 127.0.0.1:\d+ +prefill +serving +0 +0 ",
        r"^decode-1 127.0.0.1:\d+ +decode +serving +0 +0 ",
        r"^demo +2 of 2 ",
        r'"tokens_per_s": 0.0',
    ],
    "A dashboard": [
        r'millstream_tokens_total\{.*gen_ai_token_type="output"\} [1-9]',
        r"millstream_engine_total_blocks\{.*\} [1-9]",
    ],
    "The admin port": [
        r'"code": "unauthenticated",\s+"message": "this server requires a valid API key',
        r'"pid": \d+',
        r'"drain_s": "60.0"',
        r'"ticket_key": "\*\*\*"',
        r'"openWork": \{\s+"streams": "0"',
        r'"previousLevel": "LOG_LEVEL_INHERIT"',
        r" DEBUG .*: RPC refused .*Complete code=INVALID_ARGUMENT reason=INVALID_REQUEST",
        r'"previousLevel": "LOG_LEVEL_DEBUG"',
        r'"callsStarted"',
        r'"target": "dns:///127.0.0.1:\d+"\D+"target": "dns:///127.0.0.1:\d+"',
    ],
    "Operate workers": [
        r"^decode-1: nothing is set: in service",
        r"^  can do: Drain, Undrain, Pause, ",
        r"^1$",
        r"^decode-1: drained after \d+\.\d\d s: no request is open$",
        r"^decode-1 127.0.0.1:\d+ +decode +not serving: drained ",
        r"^decode-1: back in service$",
        r"^decode-1: paused; 0 requests open until `continue`$",
        r"^decode-1: goes on$",
        r"^decode-1: released: kv-cache$",
        r"^  host memory: \d+\.\d MiB before, \d+\.\d MiB now$",
        r"^decode-1: resumed: kv-cache$",
        r": weights: step-200, before a version without a name; out of service for \d",
        r": weights: step-200, before a version without a name; out of service for \d",
        r"^2$",
        r"\(INVALID_WEIGHTS\): .*cut off: its header ends at byte [\d,]+, the file at 1,000",
        r"^  -> the old weights serve on$",
        r"^exit code 1$",
        r": the prefix cache is empty$",
        r": adapter sql \(/.*/.millstream/weights/sql, rank 8\) loaded$",
        r"^decode-1: 1 adapter$",
        r"^  sql \(/.*/.millstream/weights/sql, rank 8\)$",
        r": adapter sql removed$",
        r"^decode-1: recording until `stop-profile`, into /",
        r"^decode-1: recorded 1 file on the worker$",
        r"^  /.*\.json \(\d+",
    ],
    "Logs": [r"^[45]$"],
    "Drain": [
        r'"": \{\s+"status": "NOT_SERVING"',
        r'"liveness": \{\s+"status": "SERVING"',
        r'"completionTokens": 40',
        r"^exit code 0$",
        r'"code": "unavailable",\s+"message": "this server had to shut down before this was done',
        r"^exit code 3$",
        r"decode-1 serves again after",
        r"^exit code 0$",
    ],
    "A trace": [
        r"^collecting$",
        r"Ready after",
        r"trace_id=0af7651916cd43dd8448eb211c80319c model=demo .* completion_tokens=5 ",
        rf"^{_CALLER} \w+ +\d+\.\d millstream-processor millstream.v1.ProcessorService/Chat$",
    ],
    "Overload": [
        (
            r'"code": "resource_exhausted",\s+'
            r'"message": "the server is busy: the queue is full \(1 waiting\)'
        ),
        r"google.rpc.ErrorInfo[^}]+CgpPVkVSTE9BREVEEg1taWxsc3RyZWFtLmlvGhEKCXJldHJ5YWJsZRIEdHJ1ZQ",
        r"google.rpc.RetryInfo",
        r'"message": "the server is busy: a request of higher priority took this one\'s place',
        r"FINISH_REASON_LENGTH",
        r'millstream_admission_refused_total\{cause="requests"\} 1.0',
        r'millstream_admission_refused_total\{cause="displaced"\} 1.0',
        r"^exit code 0$",
    ],
    "TLS and API keys": [
        r": phase phase=serving",
        r'"role": "WORKER_ROLE_AGGREGATED",\s+"connected": 1',
        r'"code": "unauthenticated",\s+"message": "this server requires a valid API key',
        r'"code": "permission_denied"',
        r"^TTFT .* · 5 tokens · ",
        r"^error: UNAUTHENTICATED .*\n  give the key by --api-key-file, or in MILLSTREAM_API_KEY$",
        r'"applicationUtilization": 0.01',
        r"^status: SERVING$",
        r'"ready": true',
        r'"code": "unauthenticated"',
        r"^\d+$",
    ],
    "Balancing without us": [r'"weighted_round_robin"', r'"healthCheckConfig"'],
}
"""What each section's commands print, in order."""


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Run the page; answer what each section printed."""
    missing = [tool for tool in ("bash", "curl", "openssl") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"the page's commands need {', '.join(missing)}")
    return _PAGE.run(tmp_path_factory.mktemp("checkout"))


@pytest.mark.parametrize("section", list(_SAYS))
def test_a_sections_commands_print_what_it_says(printed: dict[str, str], section: str) -> None:
    expect_in_order(printed[section], _SAYS[section])


def test_every_section_with_commands_is_checked() -> None:
    assert _PAGE.sections() == list(_SAYS)


def test_the_trace_is_the_tree_that_is_drawn(printed: dict[str, str]) -> None:
    lines = re.compile(r"^(\w{16}) (\w{16}) +[\d.]+ (\S+) (.+)$", re.MULTILINE)
    spans = {own: (parent, name, by) for parent, own, by, name in lines.findall(printed["A trace"])}

    def depth(parent: str) -> int:
        return 1 if parent == _CALLER else depth(spans[parent][0]) + 1

    sent = {(name, service, depth(parent)) for parent, name, service in spans.values()}
    rows = re.findall(r"^([ │]*)[├└]─ (\S+(?: \S+)?) +(millstream-\S+)", _PAGE.text, re.MULTILINE)
    drawn = {(name, service, len(indent) // 3 + 1) for indent, name, service in rows}
    assert len(drawn) == 6
    assert sent == drawn


def test_the_readme_shows_snippets_that_are_tested() -> None:
    blocks = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    shown = blocks.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    # tests/integration/test_first_hour.py runs those of this page.
    run = blocks.findall((ROOT / "docs" / "client.md").read_text(encoding="utf-8"))
    assert len(shown) == 4
    assert set(shown) <= set(run)


def test_probes_ask_for_names_that_servers_have() -> None:
    names = re.findall(r"service: ([\w.]+)", _PAGE.text)
    known = {f"millstream.v1.{name}Service" for name in ("Decode", "Prefill", "Processor")}
    assert names.count("liveness") == 1
    assert set(names) - {"liveness"} <= known


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("a client's connection", f"{_PROCESSOR.max_connection_age_s / 60:g} min"),
        ("its open streams", f"{_PROCESSOR.transport().max_connection_age_grace_s / 60:g} min"),
        (
            "Processor → worker",
            f"every {channel.KEEPALIVE_S:g} s, dead after {channel.KEEPALIVE_TIMEOUT_S:g} s",
        ),
        ("server → client", f"every {channel.SERVER_KEEPALIVE_S:g} s, "),
        ("server → client", f"dead after {channel.SERVER_KEEPALIVE_TIMEOUT_S:g} s"),
        ("`millstream_client` →", f"every {Options().keepalive_s:g} s"),
        ("most often", f"every {channel.MIN_PING_INTERVAL_S:g} s"),
        ("streams per connection", f"{channel.MAX_CONCURRENT_STREAMS}"),
        ("calls that came in", f"{channel.MAX_PENDING_RPCS:,}"),
        ("metadata per call", f"{channel.MAX_METADATA_BYTES >> 10} KiB"),
        ("an attempt to connect", f"{channel.CONNECT_TIMEOUT_S:g} s"),
        (
            "lost worker",
            f"{channel.RECONNECT_FIRST_S:g} s, growing to {channel.RECONNECT_MOST_S:g} s",
        ),
    ],
)
def test_connection_numbers_are_those_of_the_code(row: str, told: str) -> None:
    (line,) = [
        ln for ln in _PAGE.text.splitlines() if ln.startswith("|") and row in ln.split("|")[1]
    ]
    assert told in line.split("|")[2]
