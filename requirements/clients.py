"""Install what the clients in other languages are made and tested with: `make setup-clients`.

Debian packages (`clients.debian`) and npm packages (a package-lock.json each). Quick when all is
there. Without root it prints the command instead, and fails.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = Path(__file__).with_name("clients.debian")
NPM = ("generated/typescript", "tests/clients/http", "tests/clients/web")
"""Folders, from the repository's root, whose package-lock.json is installed."""
# Also wait for another apt-get to end.
_PATIENTLY = ["-o", "Acquire::Retries=3", "-o", "DPkg::Lock::Timeout=300"]


def debian_packages() -> list[str]:
    """Read the list."""
    lines = (line.partition("#")[0].strip() for line in PACKAGES.read_text().splitlines())
    return [line for line in lines if line]


def missing_packages() -> list[str]:
    """List those that aren't installed; all, where there is no dpkg."""
    wanted = debian_packages()
    if shutil.which("dpkg-query") is None:
        return wanted
    found = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted],
        capture_output=True,
        text=True,
        check=False,  # 1: some are unknown
    )
    states = dict(line.split() for line in found.stdout.splitlines())
    return [name for name in wanted if states.get(name) != "installed"]


def install_debian() -> bool:
    """Install what is missing; False if somebody else has to."""
    missing = missing_packages()
    if not missing:
        return True
    if shutil.which("apt-get") is None:
        print("clients: no apt-get here; install the counterparts of:", *missing, file=sys.stderr)
        return False
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        print("clients: Debian packages are missing. Run:", file=sys.stderr)
        print(f"  sudo apt-get update && sudo {' '.join(install)}", file=sys.stderr)
        return False
    print(f"clients: installing {len(missing)} Debian packages (half a minute)", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["apt-get", "update"], install):
        quiet = [command[0], "-qq", *_PATIENTLY, *command[1:]]
        subprocess.run(quiet, check=True, env=environment, stdout=subprocess.DEVNULL)
    return True


def install_npm(folder: Path) -> bool:
    """Run `npm ci` if node_modules isn't of this package-lock.json."""
    lock = hashlib.sha256((folder / "package-lock.json").read_bytes()).hexdigest()
    marker = folder / "node_modules" / ".millstream-lock"
    if marker.exists() and marker.read_text() == lock:
        return True
    if shutil.which("npm") is None:
        print("clients: npm is missing; install Node.js 20 or newer", file=sys.stderr)
        return False
    name = folder.relative_to(ROOT)
    print(f"clients: npm ci in {name}", flush=True)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
    marker.write_text(lock)
    return True


def main() -> int:
    """Install all."""
    done = [install_debian(), *(install_npm(ROOT / folder) for folder in NPM)]
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
