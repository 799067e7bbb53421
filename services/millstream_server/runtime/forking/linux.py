"""Of Linux: what becomes of orphans, what `ps` shows, whose process is at a socket's other end."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import struct
import sys
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent, whose id is ``parent``, ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it had ended before the request
        os._exit(1)


def show_as(title: str) -> None:
    """Let `ps` show ``title``, if the library for that was imported: engines bring it."""
    if (setproctitle := sys.modules.get("setproctitle")) is not None:
        setproctitle.setproctitle(title)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


class OwnUsersSocket(socket.socket):
    """Accepts only processes of this process's user: an abstract address has no permissions."""

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept.

        Raises:
            OSError: ECONNABORTED: it was another user's process.
        """
        peer, address = super().accept()
        sent = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        if _CREDENTIALS.unpack(sent)[1] != os.geteuid():
            peer.close()
            raise OSError(errno.ECONNABORTED, "another user's process")
        return peer, address
