"""Addresses, and what a channel is opened with."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream_client import Client, Options, SyncClient, Tls
from millstream_client.service_config import (
    DIFFUSION_SERVICE,
    EMBEDDING_SERVICE,
    ONE_SERVER,
    RECOMMENDED,
    SERVICE,
    without_retries,
)
from millstream_client.transport import Target, Transport, parse_target, plan_transport


@pytest.mark.parametrize(
    ("address", "uri", "loopback", "one_server"),
    [
        ("127.0.0.1:50051", "127.0.0.1:50051", True, True),
        ("localhost:50051", "localhost:50051", True, True),
        ("[::1]:50051", "[::1]:50051", True, True),
        ("10.1.2.3:50051", "10.1.2.3:50051", False, True),
        ("processor:50051", "processor:50051", False, False),
        ("dns:50051", "dns:50051", False, False),
        ("dns:///processor.ns.svc:50051", "dns:///processor.ns.svc:50051", False, False),
        ("dns://127.0.0.1/processor:50051", "dns://127.0.0.1/processor:50051", False, False),
        ("127.0.0.1:1,127.0.0.2:2", "ipv4:127.0.0.1:1,127.0.0.2:2", True, False),
        ("127.0.0.1:1,10.0.0.2:2", "ipv4:127.0.0.1:1,10.0.0.2:2", False, False),
        ("[::1]:1,[::1]:2", "ipv6:[::1]:1,[::1]:2", True, False),
        ("ipv4:127.0.0.1:1", "ipv4:127.0.0.1:1", True, False),
        ("ipv6:[::1]:1", "ipv6:[::1]:1", True, False),
        ("dns:localhost:1", "dns:localhost:1", True, False),
        ("dns:///localhost:1", "dns:///localhost:1", True, False),
        # That server says who localhost is.
        ("dns://10.0.0.1/localhost:1", "dns://10.0.0.1/localhost:1", False, False),
        ("unix:///run/millstream", "unix:///run/millstream", True, True),
        ("xds:///processor", "xds:///processor", False, False),
    ],
)
def test_addresses(address: str, uri: str, *, loopback: bool, one_server: bool) -> None:
    assert parse_target(address) == Target(uri, loopback, one_server)


@pytest.mark.parametrize(
    ("address", "complaint"),
    [
        ("", "'' is not HOST:PORT"),
        ("processor", "'processor' is not HOST:PORT"),
        ("processor:", "'processor:' is not HOST:PORT"),
        ("processor:http", "is not HOST:PORT"),
        ("processor:70000", "is not HOST:PORT"),
        ("http://processor:50051", "'http://processor:50051' is not HOST:PORT"),
        ("a:1,b:2", "for a name with several addresses give dns:///NAME:PORT"),
        ("127.0.0.1:1,[::1]:2", "IP addresses of one kind"),
        ("10.0.0.7:1, 10.0.0.8:2", "' 10.0.0.8:2' is not HOST:PORT"),
        ("127.0.0.1:1\n", "is not HOST:PORT"),
    ],
)
def test_what_is_no_address_is_refused(address: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        Client(address)
    assert complaint in str(refused.value)


# ---- keys


@pytest.mark.parametrize("make", [Client, SyncClient])
def test_a_key_does_not_travel_readably(make: Any) -> None:
    with pytest.raises(ValueError, match=r"would be sent to processor:1 unencrypted.*tls=Tls\(\)"):
        make("processor:1", api_key="k-secret")
    with pytest.raises(ValueError, match="unencrypted") as refused:
        make("127.0.0.1:1,10.0.0.1:1", api_key="k-secret")
    assert "k-secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address",
    [
        "dns:///evil:443?x=/localhost:1",
        "dns:///evil:443#/localhost:1",
        "dns:///evil:443/localhost:1",
        "dns://localhost:1",
        "dns:///127.0.0.1:1,127.0.0.1:2",
        "dns:evil:443?x=/localhost:1",
        "ipv4:10.0.0.1:443?x=/127.0.0.1:1",
        "::1:5005",
        "ipv6:::1:5005",
        "[127.0.0.1:1",
        "127.0.0.1]:1",
        "[127.0.0.1]:1",
        "[localhost]:1",
        "[::1%25eth0]:1",
        "localhost%2eevil:1",
    ],
)
def test_what_grpc_may_read_as_another_host_is_refused(address: str) -> None:
    """The key would go there; gRPC connects to ``evil`` in the first two."""
    with pytest.raises(ValueError, match=r"is not HOST:PORT \(an IPv6 HOST stands in brackets\)"):
        Client(address, api_key="k-secret")


@pytest.mark.parametrize(
    ("address", "settings"),
    [
        ("127.0.0.1:1", {}),
        ("unix:/run/millstream", {}),
        ("processor:1", {"tls": Tls()}),
        ("processor:1", {"options": Options(allow_plaintext_key=True)}),
    ],
)
def test_a_key_travels_where_nobody_reads_it(address: str, settings: dict[str, Any]) -> None:
    assert Client(address, api_key="k", **settings).metadata() == (("authorization", "Bearer k"),)


def test_half_a_client_certificate_is_refused() -> None:
    with pytest.raises(ValueError, match="one is missing"):
        Client("processor:1", tls=Tls(cert_file="tls.crt"))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"ca\.crt"):
        Client("processor:1", tls=Tls(ca_file=tmp_path / "ca.crt"))


# ---- channel arguments


def _plan(address: str, options: Options | None = None, tls: Tls | None = None) -> Transport:
    return plan_transport(address, None, tls, options or Options())


def _config(plan: Transport) -> Any:
    return json.loads(dict(plan.args)["grpc.service_config"])


def test_several_servers_get_the_recommended_config() -> None:
    for address in ("processor:1", "127.0.0.1:1,127.0.0.1:2"):
        assert _config(_plan(address)) == without_retries(RECOMMENDED)


def test_one_server_is_neither_balanced_nor_watched() -> None:
    config = _config(_plan("127.0.0.1:1"))
    assert config == without_retries(ONE_SERVER)
    assert "healthCheckConfig" not in config


@pytest.mark.parametrize("own", [None, RECOMMENDED])
def test_grpcs_retries_dont_multiply_ours(own: Mapping[str, Any] | None) -> None:
    config = _config(_plan("processor:1", Options(service_config=own)))
    assert "retryPolicy" not in config["methodConfig"][0]
    assert config["loadBalancingConfig"] == RECOMMENDED["loadBalancingConfig"]
    assert "retryPolicy" in RECOMMENDED["methodConfig"][0]


def test_own_config_and_arguments_win() -> None:
    options = Options(service_config={}, channel_args=(("grpc.keepalive_time_ms", 1),))
    plan = _plan("processor:1", options)
    assert _config(plan) == {}
    assert dict(plan.args)["grpc.keepalive_time_ms"] == 1


def test_the_proxy_is_passed_by_for_this_machine_only() -> None:
    assert dict(_plan("localhost:1").args)["grpc.enable_http_proxy"] == 0
    assert "grpc.enable_http_proxy" not in dict(_plan("processor:1").args)


def test_no_ping_comes_sooner_than_servers_take_it() -> None:
    assert dict(_plan("processor:1").args)["grpc.keepalive_time_ms"] >= 10_000


def test_the_certificates_name_may_differ() -> None:
    plan = _plan("10.0.0.1:1", tls=Tls(server_name="processor"))
    assert dict(plan.args)["grpc.ssl_target_name_override"] == "processor"


# ---- the config on its own


def test_the_config_is_printed_for_other_languages() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "millstream_client.service_config"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert json.loads(done.stdout) == RECOMMENDED


def test_the_config_keeps_to_grpcs_limits() -> None:
    (method,) = RECOMMENDED["methodConfig"]
    names = [SERVICE, DIFFUSION_SERVICE, EMBEDDING_SERVICE]
    assert method["name"] == [{"service": name} for name in names]
    assert method["retryPolicy"]["maxAttempts"] == 5  # gRPC takes more for 5
    assert method["retryPolicy"]["retryableStatusCodes"] == ["UNAVAILABLE"]
    assert 0 < RECOMMENDED["retryThrottling"]["maxTokens"] <= 1000


def test_the_library_stands_alone() -> None:
    """It can be shipped without the server."""
    code = (
        "import sys, millstream_client; "
        "print([m for m in sys.modules if m.partition('.')[0] in "
        "('millstream_server', 'transformers', 'torch', 'sglang', 'rich')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
