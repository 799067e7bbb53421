"""`python -m tests.support.docs.breaking`: is the contract compatible with every release of it?

`proto/releases/VERSION.binpb` is the contract of a release, as `buf build` wrote it; `buf breaking`
(FILE) says what of proto/ would break that release's clients. A release writes its own file with
`make release-contract`.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RELEASES = Path("proto/releases")


def main() -> int:
    """Run buf against each release; return the first exit code that isn't 0."""
    releases = sorted(RELEASES.glob("*.binpb"))
    if not releases:
        print(f"buf breaking: no release in {RELEASES} to compare with")  # noqa: T201
        return 1
    buf = str(Path(sys.executable).with_name("buf"))
    checks = (
        subprocess.run([buf, "breaking", "--against", str(release)], check=False).returncode
        for release in releases
    )
    return next((code for code in checks if code), 0)


if __name__ == "__main__":
    sys.exit(main())
