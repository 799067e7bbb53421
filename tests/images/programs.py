"""Programs that are run, and end the check if they fail."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path


def run(*words: str | Path) -> str:
    """Run a program; returns its output.

    Raises:
        SystemExit: it failed; what it wrote last is in the message.
    """
    command = [str(word) for word in words]
    print(f"$ {shlex.join(command)}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
