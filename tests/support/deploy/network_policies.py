"""What NetworkPolicies of networking.k8s.io/v1 allow, worked out as Kubernetes documents it.

A connection needs the consent of both ends. An end that no policy of that direction selects
consents to everything; else one rule of one such policy must match the other end and the port.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Manifest = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """A pod, or (without a namespace) an address outside of the cluster."""

    name: str
    ip: str
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


def allowed(
    policies: Sequence[Manifest], source: End, target: End, port: int, protocol: str = "TCP"
) -> bool:
    """Whether ``source`` may open a connection to ``target``."""
    return _consents(policies, "egress", source, target, (port, protocol)) and _consents(
        policies, "ingress", target, source, (port, protocol)
    )


def _consents(
    policies: Sequence[Manifest], way: str, own: End, other: End, port: tuple[int, str]
) -> bool:
    mine = [
        policy["spec"]
        for policy in policies
        if way.capitalize() in policy["spec"]["policyTypes"]
        and own.namespace
        and policy["metadata"]["namespace"] == own.namespace
        and selects(policy["spec"]["podSelector"], own.labels)
    ]
    if not mine:
        return True
    peers = "to" if way == "egress" else "from"
    return any(
        _matches(rule, peers, own.namespace, other) and _has_port(rule, port)
        for spec in mine
        for rule in spec.get(way) or ()
    )


def _matches(rule: Manifest, peers: str, namespace: str, other: End) -> bool:
    if not rule.get(peers):
        return True
    return any(_is_peer(peer, namespace, other) for peer in rule[peers])


def _is_peer(peer: Manifest, namespace: str, other: End) -> bool:
    if "ipBlock" in peer:
        address = ipaddress.ip_address(other.ip)
        within = address in ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return within and not any(
            address in ipaddress.ip_network(part) for part in peer["ipBlock"].get("except", ())
        )
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        names = {"kubernetes.io/metadata.name": other.namespace}
        if not selects(peer["namespaceSelector"], names):
            return False
    elif other.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), other.labels)


def selects(selector: Manifest, labels: Mapping[str, str]) -> bool:
    """Whether a label selector with `matchLabels` and `In` selects these labels."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    wanted = selector.get("matchLabels", {}).items()
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(name) == value for name, value in wanted)


def _has_port(rule: Manifest, port: tuple[int, str]) -> bool:
    if not rule.get("ports"):
        return True
    number, protocol = port
    return any(
        one.get("protocol", "TCP") == protocol
        and one["port"] <= number <= one.get("endPort", one["port"])
        for one in rule["ports"]
    )
