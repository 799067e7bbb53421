"""What the chart renders, run as local processes, passes what `helm test` runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.deploy.cluster.suite import ONE_EACH, cluster, live_values
from tests.support.deploy.deploy_tools import Manifest, objects

pytestmark = pytest.mark.timeout(120)
SECURED: dict[str, Any] = {
    "security": {
        "tls": {"enabled": True, "certManager": {"issuerRef": {"name": "ca"}}},
        "apiKeys": {"enabled": True},
    },
}


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
        code, printed = await check.run(
            Path(sys.executable).with_name("millstream"),
            *(command, f"{resolver}/{address}", *map(check.local, flags)),
        )
    assert code == 0, printed
    assert "through prefill and decode" in printed
