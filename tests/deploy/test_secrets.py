"""Secrets that the chart makes are made once; an upgrade finds them in the cluster."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from millstream_server.generation.ticket import TicketKey
from tests.support.deploy.deploy_tools import CHART, NAMESPACE, RELEASE, Helm, Manifest, objects
from tests.support.deploy.rendered_pools import rendered_pools

KEYS = {"security": {"apiKeys": {"enabled": True}}}


def secrets_of(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    return {
        one["metadata"]["name"]: {
            key: base64.b64decode(value).decode() for key, value in one["data"].items()
        }
        for one in objects(manifests, "Secret")
    }


@contextmanager
def cluster_with(secrets: list[Manifest], folder: Path) -> Iterator[Path]:
    """Serve as much of an API server as `lookup` reads; yields a kubeconfig."""
    core = {"name": "secrets", "namespaced": True, "kind": "Secret", "verbs": ["get"]}
    replies: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": [core]},
    }
    for one in secrets:
        name = one["metadata"]["name"]
        replies[f"/api/v1/namespaces/{NAMESPACE}/secrets/{name}"] = one

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
        address = f"http://127.0.0.1:{server.server_port}"
        names = {"cluster": "c", "user": "u"}
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


def upgrade(helm: Helm, secrets: list[Manifest], folder: Path) -> list[Manifest]:
    """Render with Helm asking a cluster that has these secrets."""
    with cluster_with(secrets, folder) as kubeconfig:
        arguments = ["--kubeconfig", str(kubeconfig), "template", RELEASE, str(CHART)]
        arguments += ["--namespace", NAMESPACE, "--dry-run=server", "--values"]
        arguments += [str(CHART / "values-pd.yaml"), "--values", "-"]
        text = helm.run(*arguments, stdin=json.dumps(KEYS))
    return [one for one in yaml.safe_load_all(text) if one]


# Helm 4 also checks that a cluster has every kind that is rendered, which takes a real one.
def test_an_upgrade_keeps_secrets(helm3: Helm, tmp_path: Path) -> None:
    first = helm3.template("pd", values=KEYS)
    again = upgrade(helm3, objects(first, "Secret"), tmp_path)
    assert secrets_of(again) == secrets_of(first)
    assert secrets_of(upgrade(helm3, [], tmp_path)) != secrets_of(first)
    for secret in objects(first, "Secret"):
        assert secret["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_generated_secrets_are_what_services_read(helm4: Helm) -> None:
    made = secrets_of(helm4.template("pd", values=KEYS))
    TicketKey.from_hex(made["suite-millstream-ticket-key"]["ticket-key"])
    keys = made["suite-millstream-api-keys"]
    digest = hashlib.sha256(keys["default"].encode()).hexdigest()
    assert keys["api-keys"] == f"default:sha256:{digest}\n"


@pytest.mark.parametrize("existing", [{}, {"existingSecret": "mine", "key": "hex"}])
def test_all_roles_that_sign_tickets_read_one_secret(existing: dict[str, str], helm4: Helm) -> None:
    manifests = helm4.template("epd", values={"security": {"ticketKey": existing}})
    made = secrets_of(manifests)
    wanted = {
        "name": existing.get("existingSecret", "suite-millstream-ticket-key"),
        "key": existing.get("key", "ticket-key"),
    }
    assert bool(made) is not bool(existing)
    for pool in rendered_pools(manifests):
        (read,) = (
            one["valueFrom"]["secretKeyRef"]
            for one in pool.container["env"]
            if one["name"] == "MILLSTREAM_TICKET_KEY"
        )
        assert read == wanted


def test_the_processor_mounts_digests_and_not_the_key(helm4: Helm) -> None:
    for pool in rendered_pools(helm4.template("pd", values=KEYS)):
        mounted = [one["secret"] for one in pool.pod["volumes"] if "secret" in one]
        if pool.role == "processor":
            (secret,) = mounted
            assert secret["items"] == [{"key": "api-keys", "path": "api-keys"}]
            assert pool.config["api_keys_file"] == "/etc/millstream/api-keys/api-keys"
        else:
            assert mounted == []
