"""The programs that `make setup-deploy` installs, and Helm in a test's words."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
CHART = ROOT / "deploy" / "helm" / "millstream"
_ENVIRONMENT = ROOT / ".venv-deploy"
BIN = _ENVIRONMENT / "bin"
SCHEMAS = _ENVIRONMENT / "schemas"
KUBERNETES = tuple(f"1.{minor}" for minor in range(30, 38))
RELEASE = "suite"
NAMESPACE = "inference"
APIS = (
    "cert-manager.io/v1",
    "cert-manager.io/v1/Certificate",
    "gateway.networking.k8s.io/v1",
    "gateway.networking.k8s.io/v1/BackendTLSPolicy",
    "gateway.networking.k8s.io/v1/GRPCRoute",
    "inference.networking.k8s.io/v1",
    "inference.networking.k8s.io/v1/InferencePool",
    "keda.sh/v1alpha1",
    "keda.sh/v1alpha1/ScaledObject",
    "leaderworkerset.x-k8s.io/v1",
    "leaderworkerset.x-k8s.io/v1/LeaderWorkerSet",
    "monitoring.coreos.com/v1",
    "monitoring.coreos.com/v1/PodMonitor",
    "monitoring.coreos.com/v1/PrometheusRule",
)
"""What a cluster may lack, and the chart looks for."""
Manifest = dict[str, Any]


def tool(name: str) -> Path:
    """Find a program; skips where it can't be had, fails where `make setup-deploy` wasn't run.

    With TOOLCHAINS=required, as in CI, it fails in either case.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip(f"{name} comes for Linux on x86-64 only")
    missing = _ENVIRONMENT / f"no-{name}"
    if missing.exists():
        why = missing.read_text(encoding="utf-8")
        if os.environ.get("TOOLCHAINS") == "required":
            pytest.fail(why)
        pytest.skip(why)
    if not (BIN / name).exists():
        pytest.fail(f"{BIN / name} is missing: run `make setup-deploy`")
    return BIN / name


class RenderError(Exception):
    """Helm refused; the text is what it says on stderr."""


@dataclass
class Helm:
    """One version of Helm. What it renders is kept, and must not be changed."""

    program: Path
    _rendered: dict[str, str] = field(default_factory=dict)
    _parsed: dict[str, list[Manifest]] = field(default_factory=dict)

    def template(self, *files: str, **options: Any) -> list[Manifest]:
        """Render as `text` does; returns the objects in their order."""
        key = json.dumps([files, options])
        if key not in self._parsed:
            documents = yaml.load_all(self.text(*files, **options), yaml.CSafeLoader)
            self._parsed[key] = [document for document in documents if document]
        return self._parsed[key]

    def text(
        self,
        *files: str,
        values: Mapping[str, Any] | None = None,
        sets: Sequence[str] = (),
        kubernetes: str = KUBERNETES[-1],
        apis: Sequence[str] = APIS,
        release: str = RELEASE,
    ) -> str:
        """Render the chart.

        Args:
            files: values files of the chart, by the middle of their names: "pd" is values-pd.yaml.
            values: further values, over those of the files.
            sets: `NAME=VALUE` each, over all others.
            kubernetes: the cluster's version.
            apis: what the cluster has beyond Kubernetes.
            release: its name.

        Raises:
            RenderError: Helm refused.
        """
        arguments = ["template", release, str(CHART), "--namespace", NAMESPACE]
        arguments += ["--kube-version", f"{kubernetes}.0"]
        arguments += [word for api in apis for word in ("--api-versions", api)]
        return self._kept(arguments + _values(files, sets), values)

    def lint(self, *files: str, values: Mapping[str, Any] | None = None) -> str:
        """Run `helm lint --strict`; returns its report, or raises RenderError."""
        return self._kept(["lint", "--strict", str(CHART), *_values(files, ())], values)

    def _kept(self, arguments: list[str], values: Mapping[str, Any] | None) -> str:
        key = json.dumps([arguments, values])
        if key not in self._rendered:
            self._rendered[key] = self.run(
                *arguments, "--values", "-", stdin=json.dumps(values or {})
            )
        return self._rendered[key]

    def run(self, *arguments: str, stdin: str = "") -> str:
        """Run Helm; returns its output."""
        ran = subprocess.run(
            [self.program, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "HELM_NO_PLUGINS": "1"},
        )
        if ran.returncode:
            raise RenderError(ran.stderr + ran.stdout)
        return ran.stdout


def _values(files: Sequence[str], sets: Sequence[str]) -> list[str]:
    paths = (str(CHART / f"values-{name}.yaml") for name in files)
    return [word for path in paths for word in ("--values", path)] + [
        word for one in sets for word in ("--set", one)
    ]


def values_files() -> list[str]:
    """Name the chart's examples: "pd" for values-pd.yaml."""
    return sorted(path.stem.removeprefix("values-") for path in CHART.glob("values-*.yaml"))


def objects(manifests: Sequence[Manifest], kind: str) -> list[Manifest]:
    """Pick the objects of a kind."""
    return [manifest for manifest in manifests if manifest["kind"] == kind]


def merged(*values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge values as Helm does: later ones win, mappings are merged."""
    found: dict[str, Any] = {}
    for one in values:
        for key, value in one.items():
            both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
            found[key] = merged(found[key], value) if both else value
    return found
