"""`python -m tests.support.breaking`: is the contract compatible with the newest release of it?

Compares proto/ with its state at the newest `v*` tag or, before the first release, at the commit
before; `buf breaking` (FILE) says what breaks clients.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() if done.returncode == 0 else ""


def main() -> int:
    """Run buf; answers its exit code."""
    base = _git("describe", "--tags", "--match", "v*", "--abbrev=0") or _git("rev-parse", "HEAD^")
    if not _git("ls-tree", base, "proto/") or not base:
        print("buf breaking: no earlier version of proto/ to compare with")  # noqa: T201
        return 0
    return subprocess.run(
        [str(Path(sys.executable).with_name("buf")), "breaking", "--against", f".git#ref={base}"],
        check=False,
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
