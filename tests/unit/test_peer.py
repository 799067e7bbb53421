"""Who is at the other end of a connection, as the transport reads it."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from millstream_server.runtime.rpc.call import CertificateName
from millstream_server.runtime.transport.sockets import names_in, peer_name
from tests.support.wire.certificates import Authority, Issued


def _der(issued: Issued) -> bytes:
    return x509.load_pem_x509_certificate(issued.cert).public_bytes(Encoding.DER)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_names_have_their_kind(authority: Authority) -> None:
    uri = "spiffe://cluster.local/ns/millstream/sa/processor"
    assert names_in(_der(authority.issue_uri(uri))) == [CertificateName("uri", uri)]
    named = _der(authority.issue("b.example", "10.0.0.1", "a.example", common_name="c.example"))
    assert names_in(named) == [
        CertificateName("dns", "b.example"),
        CertificateName("dns", "a.example"),
    ]


@pytest.mark.parametrize(
    "broken",
    [
        lambda der: der[:-1],
        lambda der: der[:0],
        lambda der: der.replace(b"a.example", b"\xff.example"),
        lambda der: der.replace(b"\x06\x03\x55\x1d\x11", b"\x06\x03\x55\x1d\x23"),
        lambda der: der.replace(b"\x06\x03\x55\x1d\x11", b"\x06\x03\x55\x1d\x77"),
    ],
    ids=["cut", "empty", "no ASCII", "an extension twice", "no SAN"],
)
def test_a_malformed_certificate_has_no_names(authority: Authority, broken: object) -> None:
    assert callable(broken)
    der = _der(authority.issue("a.example"))
    changed = broken(der)
    assert changed != der
    assert names_in(changed) == []


@pytest.mark.parametrize(
    ("sockaddr", "name"),
    [
        (("127.0.0.1", 5), "ipv4:127.0.0.1:5"),
        (("::ffff:10.0.0.7", 5, 0, 0), "ipv4:10.0.0.7:5"),
        (("::1", 5, 0, 0), "ipv6:%5B::1%5D:5"),
        ("", "unix:"),
        (b"\0abstract", "unix:"),
    ],
)
def test_an_address_is_written_as_grpc_does(sockaddr: object, name: str) -> None:
    assert peer_name(sockaddr) == name
