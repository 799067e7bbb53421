"""What `helm install` prints: commands that fit the release."""

from __future__ import annotations

import re
import shlex

import pytest
import yaml

from millstream_server.cli.main import make_parser
from millstream_server.routing.discovery.sources import make_discovery
from tests.support.deploy.deploy_tools import CHART, Helm

PLAIN: tuple[str, ...] = ()
SECURED = (
    "security.tls.enabled=true",
    "security.tls.existingSecret=certificates",
    "security.apiKeys.enabled=true",
)


def _install(
    helm: Helm, sets: tuple[str, ...], values: str = "pd"
) -> tuple[str, list[dict[str, object]]]:
    """Return the notes and the objects of an install as a trial."""
    example = str(CHART / f"values-{values}.yaml")
    flags = [flag for each in sets for flag in ("--set", each)]
    printed = helm.run(
        "install", "rel", str(CHART), "--values", example, *flags, "--dry-run=client"
    )
    manifest, notes = printed.partition("MANIFEST:")[2].split("NOTES:")
    return notes, [each for each in yaml.safe_load_all(manifest) if each]


@pytest.mark.parametrize("sets", [PLAIN, SECURED], ids=["plain", "secured"])
def test_the_notes_name_what_the_release_has(helm4: Helm, sets: tuple[str, ...]) -> None:
    notes, objects = _install(helm4, sets)
    names = {(o["kind"], o["metadata"]["name"]): o for o in objects}  # type: ignore[index]
    for service in re.findall(r"svc/(\S+)", notes):
        assert ("Service", service) in names
    for name, key in re.findall(r"get secret (\S+) -o jsonpath='\{.data.([^}]+)\}'", notes):
        if name != "certificates":
            assert key in names["Secret", name]["data"]  # type: ignore[operator]
    for headless, namespace in re.findall(r"dns:///([a-z-]+)\.(\w+)\.svc", notes):
        assert names["Service", headless]["spec"]["clusterIP"] == "None"  # type: ignore[index]
        assert namespace == "default"


def test_pools_are_listed_with_their_gpus(helm4: Helm) -> None:
    notes, _ = _install(helm4, PLAIN)
    assert "decode     rel-millstream-decode-main   llama, 4 x nvidia.com/gpu per pod\n" in notes
    notes, _ = _install(helm4, PLAIN, "cpu-demo")
    assert "decode     rel-millstream-decode-main   demo\n" in notes


def test_a_download_whose_size_nobody_knows_is_named(helm4: Helm) -> None:
    sets = ("models.big.uri=hf://org/big", "decode.pools.main.model=big")
    sentence = "models.big has no size: its files go to the nodes' disks"
    assert sentence in _install(helm4, sets, "single-gpu")[0]
    assert sentence not in _install(helm4, (*sets, "models.big.size=9Gi"), "single-gpu")[0]


@pytest.mark.parametrize("sets", [PLAIN, SECURED], ids=["plain", "secured"])
def test_the_chat_command_is_one_that_there_is(helm4: Helm, sets: tuple[str, ...]) -> None:
    notes, _ = _install(helm4, sets)
    (line,) = re.findall(r"millstream (chat .*)", notes)
    parsed = make_parser().parse_args(shlex.split(line))
    assert parsed.address == "localhost:50051"
    assert bool(parsed.tls_ca_file) is bool(sets)


@pytest.mark.parametrize("kind", ["dns", "endpointslices"])
@pytest.mark.parametrize("sets", [PLAIN, SECURED], ids=["plain", "secured"])
def test_the_commands_in_pods_are_ones_that_there_are(
    helm4: Helm, sets: tuple[str, ...], kind: str
) -> None:
    """`test_top.py` runs the first against Processors and workers that such discovery finds."""
    notes, objects = _install(helm4, (*sets, f"discovery.kind={kind}", "discovery.dnsTtlSeconds=5"))
    top, *admin = (shlex.split(line)[1:] for line in re.findall(r" -- (millstream .+)", notes))
    args = make_parser().parse_args(top)
    services = {o["metadata"]["name"] for o in objects if o["kind"] == "Service"}  # type: ignore[index]
    found = {args.workers, args.address}
    assert {re.split(r"[:/.]", entry)[1 if kind == "dns" else 2] for entry in found} < services
    make_discovery([entry for entry in found if kind == "dns"] or ["127.0.0.1:1"])
    secured = sets is SECURED
    assert bool(args.worker_tls_name) is bool(args.tls_cert_file) is secured
    assert [make_parser().parse_args(line).admin for line in admin] == (
        [] if secured else [["127.0.0.1:9564"]]
    )


def test_what_an_operator_has_to_know_of_replicas_is_named(helm4: Helm) -> None:
    budget = "decode.pools.main has one replica: its disruption budget keeps nothing"
    scaled = "decode.pools.main is scaled: to switch that off with Helm 4 add --force-conflicts"
    two = ("decode.pools.main.replicas=2",)
    scaler = ("decode.pools.main.autoscaling.kind=hpa",)
    off = ("poolDefaults.pdb.enabled=false",)
    for sets, told in (((), budget), (scaler, scaled), (two, ""), (off, "")):
        notes, _ = _install(helm4, sets, "single-gpu")
        assert [text for text in (budget, scaled) if text in notes] == [told] * bool(told)
