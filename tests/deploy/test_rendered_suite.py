"""What the chart renders, run as local processes, passes what `helm test` runs."""

from __future__ import annotations

import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.deploy.cluster.cluster import Cluster
from tests.support.deploy.cluster.suite import MODEL, ONE_EACH, cluster, live_values
from tests.support.deploy.deploy_tools import NAMESPACE, RELEASE, Manifest, objects

pytestmark = pytest.mark.timeout(120)
SECURED: dict[str, Any] = {
    "security": {
        "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca"}}},
        "apiKeys": {"enabled": True},
    },
}
NAME = f"{RELEASE}-millstream"


async def test_a_rendered_suite_passes_the_check_of_helm_test(
    render: Callable[..., list[Manifest]], tmp_path: Path
) -> None:
    manifests = render(values=live_values(ONE_EACH, SECURED))
    (pod,) = objects(manifests, "Pod")
    async with cluster(tmp_path) as (made, target):
        made.apply(manifests)
        await made.rolled_out()
        check = made.container("check", pod)
        _millstream, command, address, *flags = check.spec["args"]
        resolver = target.rpartition("/")[0]
        answer = await _over_https(made)
        code, printed = await check.run(
            Path(sys.executable).with_name("millstream"),
            *(command, f"{resolver}/{address}", *map(check.local, flags)),
        )
    assert code == 0, printed
    assert "through prefill and decode" in printed
    assert answer.status_code == httpx.codes.OK, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "ABC"


async def _over_https(made: Cluster) -> httpx.Response:
    """Ask over HTTPS, by the name of the Processor's service and with the generated key."""
    (pod,) = made.pods("processor")
    key = made.objects.secrets[f"{NAME}-api-keys"]["default"]
    trust = ssl.create_default_context(cadata=made.authority.pem.decode())
    async with httpx.AsyncClient(verify=trust, trust_env=False, timeout=60) as client:
        return await client.post(
            f"https://{pod.container.ip}:50051/v1/chat/completions",
            headers={"Authorization": f"Bearer {key}"},
            json={
                "model": MODEL,
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 3,
            },
            extensions={"sni_hostname": f"{NAME}-processor.{NAMESPACE}.svc"},
        )
