"""What bounds by caller count."""

from __future__ import annotations

import pytest

from millstream_server.runtime.rpc.call import key_of_address


@pytest.mark.parametrize(
    ("peer", "key"),
    [
        ("ipv4:10.0.0.7:4711", "ipv4:10.0.0.7"),
        ("ipv6:%5B::1%5D:4711", "ipv6:::1"),
        ("ipv6:[::1]:4711", "ipv6:::1"),
        ("ipv6:[fd00::7]:1", "ipv6:fd00::7"),
        ("ipv6:[::ffff:10.0.0.7]:1", "ipv4:10.0.0.7"),
        ("ipv6:[2600:1f18:1:2:3:4:5:6]:1", "ipv6:2600:1f18:1:2::/64"),
        ("ipv6:[2600:1f18:1:2:ffff::]:9", "ipv6:2600:1f18:1:2::/64"),
        ("ipv6:[fe80::1%25eth0]:9", "ipv6:fe80::1%eth0"),
        ("unix:/run/millstream.sock", "unix:"),
        ("unix:", "unix:"),
        ("", ":"),
    ],
)
def test_a_port_and_what_a_caller_can_choose_are_left_out(peer: str, key: str) -> None:
    assert key_of_address(peer) == key
