"""values-pd.yaml as a suite of processes on simulated engines, with short times."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from millstream_client import Client
from tests.conftest import ALPHABET_TEMPLATE
from tests.support.deploy.cluster.cluster import Cluster, running_cluster
from tests.support.deploy.deploy_tools import CHART, NAMESPACE, RELEASE, merged
from tests.support.models.models import byte_level_model

MODEL = "llama"
STEP_S = 0.02
_SIMULATED = {
    "engine": "simulated",
    "context_length": 512,
    "log_format": "text",
}
_ARGUMENTS = {"step_s": STEP_S, "vocab_size": 440}
_PROBE = {"periodSeconds": 1}
_SHORT: Mapping[str, Any] = {
    "poolDefaults": {
        "parallelism": {"tensor": 1},
        "drain": {"preStopSeconds": 1, "propagationSeconds": 0.5, "limitSeconds": 15},
        "rollout": {"minReadySeconds": 0},
        "probes": {"startup": _PROBE, "readiness": _PROBE, "liveness": _PROBE},
    },
    "processor": {
        "drain": {"limitSeconds": 20},
        "rollout": {"minReadySeconds": 0},
        "settings": {"log_format": "text"},
    },
    "prefill": {"settings": _SIMULATED, "engineArgs": _ARGUMENTS},
    "decode": {"settings": _SIMULATED, "engineArgs": _ARGUMENTS},
}
"""Values over those of an example: the engine, and the times of a cluster in a hurry."""

ONE_EACH: Mapping[str, Any] = {
    "processor": {"replicas": 1},
    "prefill": {"pools": {"main": {"replicas": 1}}},
    "decode": {"pools": {"main": {"replicas": 1}}},
}
"""A pod of each role."""


def live_values(*more: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of values-pd.yaml for simulated engines, and ``more`` over them."""
    values = yaml.safe_load((CHART / "values-pd.yaml").read_text(encoding="utf-8"))
    for role in ("prefill", "decode"):
        for pool in values[role]["pools"].values():
            pool.pop("engineArgs", None)  # SGLang's own
    return merged(values, _SHORT, *more)


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[Cluster, str]]:
    """Run an empty cluster; yields it, and the gRPC target of its ready Processors."""
    models = folder / "models"
    byte_level_model(models / MODEL, tokenizer_config={"chat_template": ALPHABET_TEMPLATE})
    async with running_cluster(folder, models) as (made, dns):
        service = f"{RELEASE}-millstream-processors.{NAMESPACE}.svc.cluster.local"
        yield made, f"dns://{dns.address}/{service}:50051"


async def until_answered(client: Client) -> None:
    """Ask once, to see that the whole suite works."""
    answer = await client.chat("hi", model=MODEL, max_new_tokens=3, timeout_s=20).answer()
    assert answer.text == "ABC", answer
