"""What a forked process can tell of itself.

`python -m tests.unit.forking.told` prints one line of JSON: of itself, of a process that it
starts with multiprocessing's "spawn", and of one that this starts likewise.
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


def _spawned(further: int) -> list[dict[str, object]]:
    """Return facts of a process, and of one that it spawns, and so on."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    child = spawn.Process(target=_tell, args=(theirs, further))
    child.start()
    facts: list[dict[str, object]] = ours.recv()
    child.join()
    return facts


def _tell(end: Connection, further: int) -> None:
    end.send([_facts(), *(_spawned(further - 1) if further else ())])


def main() -> None:
    """Tell; then wait, if there is an argument."""
    os.environ["TOLD_LATE"] = "set before the spawn"
    child, grandchild = _spawned(1)
    told = {"own": _facts(), "child": child, "grandchild": grandchild}
    print(json.dumps(told), flush=True)  # noqa: T201
    if sys.argv[1:]:
        time.sleep(_LONG_S)
    sys.exit(7)


if __name__ == "__main__":
    main()
