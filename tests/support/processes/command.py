"""`python -m tests.support.processes.command ARGS` is `millstream ARGS`, and can be forked."""

from __future__ import annotations

import fcntl
import os
import sys
import termios

from millstream_server.cli.entry import main

if __name__ == "__main__":
    if os.isatty(0):
        # Make it the controlling one, so that Ctrl-C signals this process as in a shell.
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.exit(main())
