"""Run a command that the kernel kills with its parent: `python lifeline.py PARENT_PID COMMAND ...`.

A separate program, because the alternative, code between fork and exec in a process with threads
(gRPC's), may deadlock. It replaces itself by the command, so the pid stays the same.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Request SIGKILL at the parent's end, then execute the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent had ended before the request
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
