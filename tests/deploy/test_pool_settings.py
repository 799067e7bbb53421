"""What the chart writes is what the services read: names, ports, and the times that it adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_server.decode.app import DecodeSettings
from millstream_server.diffusion.worker.app import MediaDiffusionSettings
from millstream_server.diffusion.worker.text import TextDiffusionSettings
from millstream_server.embedding.worker.app import EmbeddingSettings
from millstream_server.encode.worker.app import EncodeSettings
from millstream_server.generation.worker.settings import WorkerSettings
from millstream_server.processor.settings import ProcessorSettings
from millstream_server.runtime import settings
from millstream_server.runtime.lifecycle.service_settings import ServiceSettings
from tests.support.deploy.deploy_tools import Manifest, values_files
from tests.support.deploy.rendered_pools import RenderedPool, pool_of, rendered_pools
from tests.support.processes import forked

Render = Callable[..., list[Manifest]]
SETTINGS: dict[str, type[ServiceSettings]] = {
    "processor": ProcessorSettings,
    "encode": EncodeSettings,
    "prefill": WorkerSettings,
    "decode": DecodeSettings,
    "embedding": EmbeddingSettings,
    "diffusion": MediaDiffusionSettings,
}
REST_OF_SHUTDOWN_S = 10
_OF_ENGINES = ("engine_args", "nodes")


def load(pool: RenderedPool, folder: Path) -> Any:
    """Read a pool's file as its service does; a setting that it doesn't have ends the test.

    Without the engine's arguments, and `nodes`, which goes with them: their check would import
    SGLang into this process, and change its environment.
    """
    config = {key: value for key, value in pool.config.items() if key not in _OF_ENGINES}
    cls = SETTINGS[pool.role]
    if pool.role == "diffusion" and config["kind"] == "text":
        cls = TextDiffusionSettings
        del config["kind"]  # read before all others
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return settings.load(
        cls, ["--config", str(file)], pool.environment, prog=pool.role, description=""
    )


def whole_numbers(value: Any) -> int:
    assert isinstance(value, int)
    return value


@pytest.mark.parametrize("name", values_files())
def test_services_read_their_files(name: str, render: Render, tmp_path: Path) -> None:
    for pool in rendered_pools(render(name)):
        read = load(pool, tmp_path)
        before = pool.container["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = math.ceil(read.propagation_s + read.drain_s)
        grace = pool.pod["terminationGracePeriodSeconds"]
        assert grace == whole_numbers(before) + drain + REST_OF_SHUTDOWN_S, pool.name
        ports = {port["name"]: port["containerPort"] for port in pool.container["ports"]}
        assert read.listen == f"0.0.0.0:{ports['grpc']}"
        assert read.metrics_listen == f"0.0.0.0:{ports['metrics']}"
        assert read.health_listen == (f"0.0.0.0:{ports['health']}" if "health" in ports else "")
        if pool.role == "prefill":
            assert read.common.bootstrap_port == ports["bootstrap"]


def test_sglang_knows_the_engines_arguments(render: Render, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {}
    for name in values_files():
        for pool in rendered_pools(render(name)):
            sglang = pool.config.get("engine", "sglang") == "sglang"
            if pool.role in ("prefill", "decode", "embedding") and sglang:
                arguments |= pool.config.get("engine_args", {})
    assert "tp_size" in arguments
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({"engine_args": arguments}), encoding="utf-8")
    asked = ("--config", str(file), "--print-config")
    read = forked.run("sglang", "millstream_server.decode", *asked)
    assert read.returncode == 0, read.stderr
    printed = yaml.safe_load(read.stdout)["engine_args"]
    assert printed == arguments


@pytest.mark.parametrize(
    ("pool_values", "grace"),
    [
        ({}, 5 + 301 + 10),
        ({"settings": {"drain_s": 1200, "propagation_s": 2}}, 5 + 1202 + 10),
        ({"settings": {"drain": {"s": 7.2}}}, 5 + 8 + 10),
        ({"drain": {"preStopSeconds": 0, "propagationSeconds": 0, "limitSeconds": 30}}, 30 + 10),
    ],
)
def test_grace_follows_the_settings_that_the_service_gets(
    pool_values: dict[str, Any], grace: int, render: Render, tmp_path: Path
) -> None:
    pool = pool_of(
        render("single-gpu", values={"decode": {"pools": {"main": pool_values}}}), "decode"
    )
    assert pool.pod["terminationGracePeriodSeconds"] == grace
    read = load(pool, tmp_path)
    before = pool.container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert before + math.ceil(read.propagation_s + read.drain_s) + REST_OF_SHUTDOWN_S == grace


def test_a_change_of_settings_restarts_only_that_pool(render: Render) -> None:
    values = {"decode": {"pools": {"main": {"settings": {"max_running_requests": 7}}}}}

    def checksums(manifests: list[Manifest]) -> dict[str, str]:
        return {
            pool.role: pool.template["metadata"]["annotations"]["checksum/config"]
            for pool in rendered_pools(manifests)
        }

    before, after = checksums(render("pd")), checksums(render("pd", values=values))
    assert {role for role in before if before[role] != after[role]} == {"decode"}


def test_the_processor_knows_models_and_workers(render: Render, tmp_path: Path) -> None:
    read = load(pool_of(render("all"), "processor"), tmp_path)
    assert read.workers == ("k8s:inference/suite-millstream-workers",)
    directories = {name: str(path or "") for name, path in read.model_directories().items()}
    assert directories == {
        "bge-reranker": "/models/bge-reranker",
        "deepseek-ai/DeepSeek-V3": "/models/deepseek",
        "llada": "/models/llada",
        "qwen-embedding": "/models/qwen-embedding",
        "qwen-vl": "/models/qwen-vl",
        "small": "/models/small",
        "wan-video": "",
        "z-image": "",
    }
    mounts = pool_of(render("all"), "processor").container["volumeMounts"]
    mounted = {mount["mountPath"] for mount in mounts}
    assert {directory for directory in directories.values() if directory} <= mounted


def test_modes_follow_the_pools(render: Render) -> None:
    manifests = render("all")
    modes = {
        name: pool_of(manifests, "decode", name).config["mode"]
        for name in ("vision", "large", "small")
    }
    assert modes == {"vision": "disaggregated", "large": "aggregated", "small": "aggregated"}
