"""What a check prints: a line per step, and what to do about one that failed."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable

from millstream_client import MillstreamError
from millstream_server.cli.client import explain
from millstream_server.cli.flags import Destination


class CheckFailedError(Exception):
    """A step failed; the text says why, ``advice`` what to do."""

    def __init__(self, why: str, advice: str = "") -> None:
        super().__init__(why)
        self.advice = advice


class Report:
    """Prints the steps and knows whether one failed."""

    def __init__(self, server: Destination) -> None:
        self.failed = 0
        self.passed = 0
        self._server = server
        self._said = ""
        self._signs = _signs()

    async def step(self, name: str, work: Awaitable[str]) -> bool:
        """Run a step, which returns what it found; print the line; return whether it passed."""
        began = time.monotonic()
        try:
            found = await work
        except (CheckFailedError, MillstreamError) as error:
            self.failed += 1
            why, *more = self.explain(error)
            self._print("✗", name, why, began)
            for line in more:
                print(f"  {line}")
            return False
        self.passed += 1
        self._print("✓", name, found, began)
        return True

    def explain(self, error: CheckFailedError | MillstreamError) -> list[str]:
        """Return why a step failed, then lines of advice."""
        if isinstance(error, CheckFailedError):
            return [str(error), *([f"-> {error.advice}"] if error.advice else [])]
        why, *more = (line.removeprefix("error: ").strip() for line in explain(error, self._server))
        return [why, *(f"-> {line}" for line in more)]

    def waiting(self, name: str, why: str) -> None:
        """Print what is waited for, once."""
        line = f"{self._signs['…']} {name}: waiting: {why}"
        if line != self._said:
            print(line, flush=True)
        self._said = line

    def note(self, name: str, what: str) -> None:
        """Print what is neither good nor bad."""
        print(f"- {name}: {what}", flush=True)

    def conclude(self) -> int:
        steps = self.passed + self.failed
        if self.failed:
            print(f"{self.failed} of {steps} steps failed")
            return 1
        print(f"all {steps} steps passed")
        return 0

    def _print(self, sign: str, name: str, what: str, began: float) -> None:
        print(f"{self._signs[sign]} {name}: {what} ({time.monotonic() - began:.2f} s)", flush=True)


def _signs() -> dict[str, str]:
    """Return the signs as the output can show them; a container may have no locale for them."""
    signs = {"✓": "ok", "✗": "FAILED", "…": "..."}
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # what servers say may hold anything
    try:
        "".join(signs).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return signs
    return {sign: sign for sign in signs}
