"""The entry point of `millstream`: reports if the command line's packages are missing."""

from __future__ import annotations

import sys

_PLAIN = ("health", "check", "admin")


def main() -> int:
    """Run the command line; return the exit code."""
    if sys.argv[1:2] and sys.argv[1] in _PLAIN:
        from millstream_server.cli.plain import main as run_plain  # noqa: PLC0415 - starts quickly

        return run_plain()
    try:
        from millstream_server.cli.main import main as run  # noqa: PLC0415 - it may fail
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("rich", "prompt_toolkit", "packaging"):
            raise
        print(
            "error: the millstream command needs further packages: pip install 'millstream[cli]'",
            file=sys.stderr,
        )
        return 1
    return run()
