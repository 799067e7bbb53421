"""As much of an API server as Helm asks when it renders against a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from tests.support.deploy.deploy_tools import APIS, CHART, NAMESPACE, RELEASE, Helm, Manifest


def render_on(
    helm: Helm,
    known: Sequence[Manifest],
    there: Sequence[Manifest],
    folder: Path,
    *files: str,
    values: Mapping[str, Any] | None = None,
) -> list[Manifest]:
    """Render with a Helm that asks a cluster.

    Args:
        helm: either Helm.
        known: the cluster has the kinds of these; Helm 4 wants all that it renders.
        there: the objects that it has.
        folder: for the file with its address.
        files: values files of the chart, by the middle of their names.
        values: further values.
    """
    with _cluster([*known, *there], there, folder) as kubeconfig:
        arguments = ["--kubeconfig", str(kubeconfig), "template", RELEASE, str(CHART)]
        arguments += ["--namespace", NAMESPACE, "--dry-run=server"]
        arguments += ["--disable-openapi-validation"]
        arguments += [
            word for name in files for word in ("--values", str(CHART / f"values-{name}.yaml"))
        ]
        # Of those Helm 3 doesn't ask the cluster here.
        arguments += [word for api in APIS for word in ("--api-versions", api)]
        text = helm.run(*arguments, "--values", "-", stdin=json.dumps(values or {}))
    return [one for one in yaml.safe_load_all(text) if one]


@contextmanager
def _cluster(known: Sequence[Manifest], there: Sequence[Manifest], folder: Path) -> Iterator[Path]:
    """Serve; yields a kubeconfig."""
    replies = _replies(known, there)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            reply = replies.get(self.path.partition("?")[0])
            body = json.dumps(reply or {"kind": "Status", "reason": "NotFound", "code": 404})
            self.send_response(404 if reply is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        names = {"cluster": "c", "user": "u"}
        address = f"http://127.0.0.1:{server.server_port}"
        config = {
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": names}],
            "current-context": "x",
        }
        file = folder / "kubeconfig"
        file.write_text(json.dumps(config), encoding="utf-8")
        try:
            yield file
        finally:
            server.shutdown()
            thread.join()


def _replies(known: Sequence[Manifest], there: Sequence[Manifest]) -> dict[str, Any]:
    """What is served, by path: discovery, lists, objects."""
    kinds = {(one["apiVersion"], one["kind"]) for one in known}
    groups: dict[str, Any] = {}
    replies: dict[str, Any] = {
        "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
    }
    for api, kind in sorted(kinds):
        root = "/api/v1" if api == "v1" else f"/apis/{api}"
        resource = {"name": _plural(kind), "namespaced": True, "kind": kind, "verbs": ["get"]}
        found = replies.setdefault(
            root, {"kind": "APIResourceList", "groupVersion": api, "resources": []}
        )
        found["resources"].append(resource)
        if api != "v1":
            group, version = api.split("/")
            preferred = {"groupVersion": api, "version": version}
            groups[group] = {
                "name": group,
                "versions": [preferred],
                "preferredVersion": preferred,
            }
        folder = f"{root}/namespaces/{NAMESPACE}/{_plural(kind)}"
        items = [
            _installed(one) for one in there if (one["apiVersion"], one["kind"]) == (api, kind)
        ]
        replies[folder] = {"kind": f"{kind}List", "apiVersion": api, "items": items}
        replies |= {f"{folder}/{one['metadata']['name']}": one for one in items}
    replies["/apis"] = {
        "kind": "APIGroupList",
        "apiVersion": "v1",
        "groups": list(groups.values()),
    }
    return replies


def _installed(manifest: Manifest) -> Manifest:
    """Mark an object as this release's, as an install does: Helm 4 refuses another's."""
    metadata = manifest["metadata"]
    owner = {
        "meta.helm.sh/release-name": RELEASE,
        "meta.helm.sh/release-namespace": NAMESPACE,
    }
    annotations = {**metadata.get("annotations", {}), **owner}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}


def _plural(kind: str) -> str:
    word = kind.lower()
    return f"{word[:-1]}ies" if word.endswith("y") else f"{word}s"
