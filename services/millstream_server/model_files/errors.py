"""Why the files of a model can't be had.

FetchError          with a sentence for people
├── RefusedError    exit code 2: another attempt fails in the same way
└── FailedError     exit code 1: another attempt may succeed
"""

from __future__ import annotations

import errno
import os


class FetchError(Exception):
    """A model's files aren't there; the text says why and what to do."""

    exit_code = 1


class RefusedError(FetchError):
    """Somebody has to change something first: the URI, the token, the directory, the disk."""

    exit_code = 2


class FailedError(FetchError):
    """The network, a server or a file's content; a further attempt goes on from here."""


def disk_error(error: OSError, directory: object) -> FetchError:
    """Say in a sentence what the file system doesn't do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RefusedError(
            f"{directory} is full ({error.strerror}). Give it more space; the next attempt keeps "
            "the files that are complete"
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return RefusedError(
            f"can't write to {directory} ({error.strerror}). It must be writable for user "
            f"{os.getuid()}; in Kubernetes set fsGroup in the pod's securityContext"
        )
    return FailedError(f"can't write to {directory}: {error.strerror or error}")
