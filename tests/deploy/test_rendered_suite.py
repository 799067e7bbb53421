"""What the chart renders, run as local processes, passes what `helm test` runs."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from tests.support.certificates import Authority, SecretMount
from tests.support.deploy_tools import ROOT, Manifest, objects
from tests.support.ports import free_port
from tests.support.rendered_pools import RenderedPool, rendered_pools
from tests.support.suite import ServiceProcess, stop_all

WORKERS: dict[str, Any] = {
    "enabled": True,
    "settings": {"engine": "simulated", "simulated_vocab_size": 2048},
    "pools": {"main": {"model": "demo"}},
}
VALUES: dict[str, Any] = {
    "models": {"demo": {"tokenizerUri": f"file://{ROOT}/demo/model"}},
    "security": {
        "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca"}}},
        "apiKeys": {"enabled": True},
    },
    "prefill": WORKERS,
    "decode": WORKERS,
}


class LocalPods:
    """Stands in for kubelet and cert-manager: mounts and addresses below a folder."""

    def __init__(self, manifests: list[Manifest], folder: Path) -> None:
        self.folder = folder
        self.secrets = {
            one["metadata"]["name"]: {
                key: base64.b64decode(value) for key, value in one["data"].items()
            }
            for one in objects(manifests, "Secret")
        }
        authority = Authority()
        for one in objects(manifests, "Certificate"):
            issued = authority.issue(*one["spec"]["dnsNames"])
            files = {"tls.crt": issued.cert, "tls.key": issued.key, "ca.crt": issued.ca}
            self.secrets[one["spec"]["secretName"]] = files

    def mounts(self, spec: dict[str, Any]) -> dict[str, str]:
        """Write a pod's secrets; returns where each mounted path is."""
        places = {}
        volumes = {one["name"]: one["secret"] for one in spec["volumes"] if "secret" in one}
        for mount in spec["containers"][0]["volumeMounts"]:
            if mount["name"] in volumes:
                secret = volumes[mount["name"]]
                place = self.folder / secret["secretName"]
                if not place.exists():
                    SecretMount(place).put_files(self.secrets[secret["secretName"]])
                places[mount["mountPath"]] = str(place)
        return places

    def process(self, pool: RenderedPool, **flags: object) -> ServiceProcess:
        """Make the process of a pool's pod, with the file that it reads."""
        text = yaml.safe_dump(pool.config)
        for path, place in self.mounts(pool.pod).items():
            text = text.replace(path, place)
        file = self.folder / f"{pool.role}.yaml"
        file.write_text(text, encoding="utf-8")
        _python, _m, module, _config, _path = pool.container["args"]
        own = {"config": file, "admin_listen": "", "health_listen": f"127.0.0.1:{free_port()}"}
        return ServiceProcess(
            module=module,
            flags={**own, **flags},
            log=self.folder / f"{pool.role}.log",
            env={
                "MILLSTREAM_TICKET_KEY": self.secrets["suite-millstream-ticket-key"][
                    "ticket-key"
                ].decode(),
                "MILLSTREAM_BOOTSTRAP_HOST": "127.0.0.1",
            },
        )


def test_a_rendered_suite_passes_the_check_of_helm_test(
    render: Callable[..., list[Manifest]], tmp_path: Path
) -> None:
    manifests = render(values=VALUES)
    pods = LocalPods(manifests, tmp_path)
    pools = {pool.role: pool for pool in rendered_pools(manifests)}
    prefill = pods.process(pools["prefill"], bootstrap_port=free_port())
    decode = pods.process(pools["decode"])
    # Workers are dialled by address, as pods are: their certificates have no IP addresses.
    processor = pods.process(pools["processor"], workers=f"{prefill.address},{decode.address}")
    (test,) = objects(manifests, "Pod")
    _millstream, *arguments = test["spec"]["containers"][0]["args"]
    for path, place in pods.mounts(test["spec"]).items():
        arguments = [argument.replace(path, place) for argument in arguments]
    arguments[1] = f"localhost:{processor.port}"
    key = pods.secrets["suite-millstream-api-keys"]["default"].decode()
    services = (prefill, decode, processor)
    try:
        for service in services:
            service.start()
        ran = subprocess.run(
            [Path(sys.executable).with_name("millstream"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "MILLSTREAM_API_KEY": key},
        )
    finally:
        stop_all(*services)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "through prefill and decode" in ran.stdout
