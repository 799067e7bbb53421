"""Which addresses EndpointSlices name."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_server.routing.discovery.kubernetes import UnusableSliceError, addresses_of
from tests.support.processor.fake_kubernetes import endpoint, endpoint_slice


def test_slices_are_merged_and_a_worker_in_two_of_them_counts_once() -> None:
    slices = [
        endpoint_slice("a", endpoint("10.0.0.1", "p-1"), endpoint("10.0.0.2", "p-2")),
        endpoint_slice("b", endpoint("10.0.0.2", "p-2"), endpoint("10.0.0.3")),
    ]
    assert addresses_of(slices) == {"10.0.0.1:50051", "10.0.0.2:50051", "10.0.0.3:50051"}


def test_a_worker_with_both_families_is_reached_by_ipv4() -> None:
    slices = [
        endpoint_slice("a6", endpoint("fd00::1", "p-1"), endpoint("fd00::2", "p-2"), family="IPv6"),
        endpoint_slice("a4", endpoint("10.0.0.1", "p-1")),
    ]
    assert addresses_of(slices) == {"10.0.0.1:50051", "[fd00::2]:50051"}
    assert addresses_of(reversed(slices)) == addresses_of(slices)


@pytest.mark.parametrize(
    ("conditions", "kept"),
    [
        ({}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": False, "serving": True, "terminating": True}, True),
        ({"ready": False, "terminating": True}, True),
        ({"ready": False, "serving": False, "terminating": True}, False),
    ],
)
def test_a_worker_is_dropped_when_it_terminates_and_no_longer_serves(
    conditions: dict[str, Any], *, kept: bool
) -> None:
    found = addresses_of([endpoint_slice("a", endpoint("10.0.0.1", "p-1", **conditions))])
    assert bool(found) is kept


@pytest.mark.parametrize(
    ("ports", "number"),
    [
        ([{"name": "metrics", "port": 9464}, {"name": "grpc", "port": 50061}], 50061),
        ([{"name": "", "port": 7}], 7),
        ([{"port": 7, "protocol": "TCP"}], 7),
        ([{"name": "grpc", "port": 53, "protocol": "UDP"}, {"name": "x", "port": 7}], 7),
    ],
)
def test_the_port_is_the_one_named_grpc_else_the_only_one(ports: list[Any], number: int) -> None:
    found = addresses_of([endpoint_slice("a", endpoint("10.0.0.1"), ports=ports)])
    assert found == {f"10.0.0.1:{number}"}


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            endpoint_slice(
                "a",
                endpoint("10.0.0.1"),
                ports=[{"name": "main", "port": 1}, {"name": "admin", "port": 2}],
            ),
            "EndpointSlice a has the ports admin, main: name the port of gRPC 'grpc'",
        ),
        (endpoint_slice("a", endpoint("10.0.0.1"), ports=[]), "EndpointSlice a has no TCP port"),
        (
            endpoint_slice("a", endpoint("w.example"), family="FQDN"),
            "EndpointSlice a has addresses of type 'FQDN', not of IPv4 or IPv6",
        ),
        (
            endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"name": "grpc", "port": "high"}]),
            "is not as it should be: ValueError",
        ),
        (
            endpoint_slice("a", endpoint("10.0.0.1"), ports=[{"name": "grpc", "port": 65536}]),
            "EndpointSlice a has the port 65536",
        ),
        (
            endpoint_slice("a", endpoint("unix:///run/x")),
            "'unix:///run/x' does not appear to be an IPv4 or IPv6 address",
        ),
        ({"metadata": {"name": "a"}, "endpoints": [{"addresses": []}]}, "is not as it should be"),
        ({"metadata": {"name": "a"}, "endpoints": ["x"]}, "is not as it should be"),
        ({}, "is not as it should be: KeyError('metadata')"),
    ],
)
def test_a_slice_that_cannot_be_used_is_refused_in_a_sentence(
    broken: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnusableSliceError) as refused:
        addresses_of([broken])
    assert sentence in str(refused.value)


def test_a_slice_without_endpoints_needs_no_port() -> None:
    assert addresses_of([endpoint_slice("a", ports=[], family="FQDN")]) == frozenset()
