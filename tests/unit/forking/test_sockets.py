from __future__ import annotations

import errno
import os
import secrets
import socket

import pytest

from millstream_server.runtime.forking.linux import OwnUsersSocket


@pytest.mark.parametrize("own", [True, False])
def test_only_processes_of_the_same_user_are_accepted(
    monkeypatch: pytest.MonkeyPatch, *, own: bool
) -> None:
    address = f"\0millstream-test-{secrets.token_hex(8)}"
    with (
        OwnUsersSocket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client,
    ):
        listener.bind(address)
        listener.listen()
        client.connect(address)
        if own:
            peer, _ = listener.accept()
            with peer:
                peer.send(b"x")
            assert client.recv(1) == b"x"
        else:
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            with pytest.raises(ConnectionAbortedError) as refused:
                listener.accept()
            assert refused.value.errno == errno.ECONNABORTED
            assert client.recv(1) == b""
