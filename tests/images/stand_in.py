"""A base image made here, for machines that can't pull one: Debian, and a Python copied into it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.images.programs import run

NAME = "localhost/millstream-stand-in:python"
_SUITE = "trixie"
_LIBRARIES = "ca-certificates,libbz2-1.0,libffi8,liblzma5,libsqlite3-0,libssl3t64,zlib1g"
"""What Python's own modules need."""
_LEFT_OUT = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "*.a")
_DOCKERFILE = """\
FROM scratch
ADD root.tar /
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python3"]
"""


def make_base(builder: str, folder: Path, arguments: Sequence[str]) -> str:
    """Make the image, as root; returns its name. ``arguments``: of the builder.

    debootstrap gets Debian. The Python is the one that runs this, without its packages but pip.
    """
    root = folder / "root"
    run("debootstrap", "--variant=minbase", f"--include={_LIBRARIES}", _SUITE, root)
    _copy_python(Path(sys.base_prefix), root / "usr" / "local")
    run("chroot", root, "/sbin/ldconfig")
    run("chroot", root, "/usr/local/bin/python", "-m", "ensurepip", "--default-pip")
    shutil.rmtree(root / "var" / "cache" / "apt", ignore_errors=True)
    context = folder / "context"
    context.mkdir()
    (context / "Dockerfile").write_text(_DOCKERFILE, encoding="utf-8")
    run("tar", "-C", root, "-cf", context / "root.tar", ".")
    run(builder, "build", "-t", NAME, *arguments, context)
    return NAME


def _copy_python(prefix: Path, target: Path) -> None:
    version = "{}.{}".format(*sys.version_info)
    shutil.copytree(
        prefix / "lib" / f"python{version}", target / "lib" / f"python{version}", ignore=_LEFT_OUT
    )
    for library in (prefix / "lib").glob("libpython*.so*"):
        shutil.copy2(library, target / "lib", follow_symlinks=False)
    shutil.copy2(Path(sys.base_prefix, "bin", f"python{version}"), target / "bin")
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(f"python{version}")
    (target / "lib" / f"python{version}" / "site-packages").mkdir()
