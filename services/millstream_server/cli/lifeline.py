"""Run a command that can't outlive its parent: `python lifeline.py PARENT_PID COMMAND ...`.

A program between the two, because the alternative, code between fork and exec of a process that has
threads (gRPC's), may deadlock. It replaces itself by the command, so the pid stays.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to kill us with the parent, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # It died before we asked.
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  # no shell is wanted


if __name__ == "__main__":
    main()
