"""What a forked process can tell of itself.

`python -m tests.unit.forking.told` prints one line of JSON: of itself, and of a process that
it starts with multiprocessing's "spawn".
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

_LONG_S = 60.0


def _facts() -> dict[str, object]:
    return {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "imported": "this" in sys.modules,
        "environment": {name: os.environ.get(name) for name in ("TOLD_HOOK", "TOLD_LATE")},
    }


def _tell(end: Connection) -> None:
    end.send(_facts())


def main() -> None:
    """Tell; then wait, if there is an argument."""
    os.environ["TOLD_LATE"] = "set before the spawn"
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_tell, args=(theirs,))
    child.start()
    print(json.dumps({"own": _facts(), "child": ours.recv()}), flush=True)  # noqa: T201
    child.join()
    if sys.argv[1:]:
        time.sleep(_LONG_S)
    sys.exit(child.exitcode or 7)


if __name__ == "__main__":
    main()
