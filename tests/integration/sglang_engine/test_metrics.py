"""SGLang's own metrics in our scrape: real ones, complete, as they are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.engines.scraped_engine import NEW, PROMPT, REQUESTS
from tests.support.processes import forked
from tests.support.telemetry.scraping import Scrape

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(240)]

WARM_UP_PROMPT, WARM_UP_NEW = 4, 2
_STALE = """
from prometheus_client import Counter
Counter("sglang:num_requests", "of another process", ["model_name"]).labels("stale").inc(1000)
"""


def _seen(model: Path, directory: Path | None) -> dict[str, Any]:
    """Run the engine; ``directory`` is one that the environment names."""
    named = {"PROMETHEUS_MULTIPROC_DIR": str(directory)} if directory else {}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **named}
    if directory:
        directory.mkdir()
        subprocess.run([sys.executable, "-c", _STALE], env=environment, check=True)
        assert list(directory.glob("counter_*.db"))
    # With a directory in its environment it gets an interpreter of its own, as a user's does.
    done = forked.run(
        "sglang", "tests.support.engines.scraped_engine", str(model), environment=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


@pytest.mark.parametrize("named", [False, True], ids=["plain", "environment names a directory"])
def test_sglangs_metrics_pass_through(model: Path, tmp_path: Path, *, named: bool) -> None:
    directory = tmp_path / "named" if named else None
    seen = _seen(model, directory)
    scrapes = {name: Scrape(*parts) for name, parts in seen["scrapes"].items()}
    _check_values(scrapes, seen)
    _check_form(scrapes)
    assert seen["directory"] != str(directory)
    assert not seen["directory_left"]
    assert not seen["variable_left"]


def _check_values(scrapes: dict[str, Scrape], seen: dict[str, Any]) -> None:
    after, busy, idle = scrapes["after"], scrapes["busy"], scrapes["idle"]
    # From the tokenizer manager, which lives in the worker's process.
    tiny = {"model_name": "tiny", "engine_type": "unified", "is_streaming": "true"}
    prompts = REQUESTS * PROMPT + WARM_UP_PROMPT
    tokens = REQUESTS * NEW + WARM_UP_NEW
    assert after.value("sglang:prompt_tokens_total", **tiny) == prompts
    assert after.value("sglang:generation_tokens_total", **tiny) == tokens
    assert after.value("sglang:num_requests_total", **tiny) == REQUESTS + 1
    assert after.value("sglang:time_to_first_token_seconds_count", **tiny) == REQUESTS + 1
    waits = tokens - (REQUESTS + 1)  # all but the first token of each
    assert after.value("sglang:inter_token_latency_seconds_count", model_name="tiny") == waits
    assert after.families["sglang:time_to_first_token_seconds"].type == "histogram"
    # From the scheduler's process.
    assert busy.value("sglang:num_running_reqs", model_name="tiny", tp_rank="0") == 1
    assert busy.value("sglang:num_queue_reqs", model_name="tiny") == 0
    assert 0 < busy.value("sglang:token_usage", model_name="tiny") < 1
    assert busy.value("sglang:num_used_tokens", model_name="tiny") > PROMPT
    assert idle.value("sglang:token_usage", model_name="tiny") == 0
    assert idle.value("sglang:num_queue_reqs", model_name="tiny") == 0
    # Ours.
    pages = {"page_size": str(seen["block_size"]), "num_pages": str(seen["total_blocks"])}
    assert idle.value("sglang:cache_config_info", **pages) == 1
    assert busy.value("millstream_engine_running_requests", model="tiny") == 1
    assert busy.value("millstream_engine_used_blocks", model="tiny") > PROMPT
    assert busy.value("millstream_engine_total_blocks", model="tiny") == seen["total_blocks"]
    labels = {"engine": "sglang", "role": "aggregated", "device": "cpu"}
    assert busy.value("millstream_engine_info", **labels) == 1


def _check_form(scrapes: dict[str, Scrape]) -> None:
    names = {}
    for name, answer in scrapes.items():
        families = answer.families  # parses, and has no series twice
        names[name] = {family for family in families if family.startswith("sglang:")}
        assert len(names[name]) > 50
        others = ("sglang:", "millstream_", "gen_ai_", "rpc_", "http_", "process_", "python_")
        assert [family for family in families if not family.startswith(others)] == []
        assert not [s for f in families.values() for s in f.samples if s.name.endswith("_created")]
        assert "stale" not in answer.text
    assert names["openmetrics"] == names["idle"]
    assert scrapes["openmetrics"].content_type.startswith("application/openmetrics-text")
