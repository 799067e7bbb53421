"""The chart's tools, as fixtures; what one test renders, the next has for nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.support.deploy.deploy_tools import KUBERNETES, Helm, Manifest, tool
from tests.support.deploy.kube_schemas import kube_schemas


@pytest.fixture(scope="session")
def helm3() -> Helm:
    return Helm(tool("helm3"))


@pytest.fixture(scope="session")
def helm4() -> Helm:
    return Helm(tool("helm4"))


@pytest.fixture(scope="session")
def render(helm4: Helm) -> Callable[..., list[Manifest]]:
    """Render with Helm 4: `render("pd", values={…}, sets=("a=b",), kubernetes="1.30", apis=())`."""
    return helm4.template


@pytest.fixture(scope="session")
def kube_validate() -> Callable[[Sequence[Manifest], str], None]:
    """Check objects against a version's schemas: `kube_validate(render("pd"), "1.30")`."""
    tool("helm4")  # The schemas are beside it.

    def validate(manifests: Sequence[Manifest], version: str = KUBERNETES[-1]) -> None:
        schemas = kube_schemas(version)
        problems = [problem for manifest in manifests for problem in schemas.problems(manifest)]
        assert not problems, f"Kubernetes {version}:\n" + "\n".join(problems)

    return validate


@pytest.fixture(scope="session")
def promtool() -> Path:
    return tool("promtool")


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return tool("kubectl")
