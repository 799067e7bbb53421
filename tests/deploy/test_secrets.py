"""Secrets that the chart makes are made once; an upgrade finds them in the cluster."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from millstream_server.generation.ticket import TicketKey
from tests.support.deploy.deploy_tools import Helm, Manifest, objects
from tests.support.deploy.fake_api import render_on
from tests.support.deploy.rendered_pools import rendered_pools

KEYS = {"security": {"apiKeys": {"enabled": True}}}


def secrets_of(manifests: list[Manifest]) -> dict[str, dict[str, str]]:
    return {
        one["metadata"]["name"]: {
            key: base64.b64decode(value).decode() for key, value in one["data"].items()
        }
        for one in objects(manifests, "Secret")
    }


def upgrade(helm: Helm, secrets: list[Manifest], folder: Path) -> list[Manifest]:
    """Render with Helm asking a cluster that has these secrets."""
    return render_on(helm, helm.template("pd", values=KEYS), secrets, folder, "pd", values=KEYS)


@pytest.mark.parametrize("name", ["helm3", "helm4"])
def test_an_upgrade_keeps_secrets(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    helm: Helm = request.getfixturevalue(name)
    first = helm.template("pd", values=KEYS)
    again = upgrade(helm, objects(first, "Secret"), tmp_path)
    assert secrets_of(again) == secrets_of(first)
    assert secrets_of(upgrade(helm, [], tmp_path)) != secrets_of(first)
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
