"""Size, digest and bill of materials of an image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tests.images.programs import run

_MIB = 2**20


def describe(builder: str, image: str, root: Path | None, file: Path) -> str:
    """Write the bill of materials (CycloneDX 1.5) to a file; returns a line about the image.

    Args:
        root: where the image's files are; None: they can't be read, and there is no bill.
    """
    if builder == "buildah":
        about = json.loads(run("buildah", "inspect", "--type", "image", image))
        digest, size = about["FromImageDigest"], _size(builder, image)
    else:
        (about,) = json.loads(run(builder, "image", "inspect", image))
        digest, size = about["Id"], f"{about['Size'] / _MIB:.0f} MiB"
    line = f"{image}: {size}, {digest}"
    if root is None:
        return line
    components = [*_python(root), *_debian(root)]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "metadata": {"component": {"type": "container", "name": image, "version": digest}},
        "components": components,
    }
    file.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return f"{line}; {len(components)} packages in {file}"


def _size(builder: str, image: str) -> str:
    return run(builder, "images", "--format", "{{.Size}}", image).strip()


def _python(root: Path) -> Iterator[dict[str, Any]]:
    folders = sorted(root.glob("opt/millstream/lib/python3*/site-packages"))
    for package in distributions(path=list(map(str, folders))):
        name = package.metadata["Name"]
        yield _component(f"pkg:pypi/{name.lower().replace('_', '-')}", name, package.version)


def _debian(root: Path) -> Iterator[dict[str, Any]]:
    for entry in (root / "var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in entry.splitlines() if ": " in line)
        if fields.get("Status", "").endswith(" installed"):
            name = fields["Package"]
            yield _component(f"pkg:deb/debian/{name}", name, fields["Version"])


def _component(url: str, name: str, version: str) -> dict[str, Any]:
    purl = f"{url}@{quote(version)}"
    return {"type": "library", "name": name, "version": version, "purl": purl}
