"""Where a model's files come from: URIs, what there is, what is wanted, and what can go wrong.

FetchError          with a sentence for people
├── RefusedError    exit code 2: another attempt fails in the same way
└── FailedError     exit code 1: another attempt may succeed
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Protocol


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


_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_S3 = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]+)/(?P<prefix>[^?#]*[^?#/])/*")
_NOTHING_TO_FETCH = {
    "pvc": "a claim is mounted as it is: there is nothing to fetch",
    "oci": "an image volume is mounted as it is: there is nothing to fetch",
}


@dataclass(frozen=True, slots=True)
class HubUri:
    """A repository of the Hugging Face Hub, or of a server with its API."""

    repo: str
    """Like org/name."""
    revision: str | None
    """A branch, tag or commit; None: the default branch."""

    def __str__(self) -> str:
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class S3Uri:
    """All objects of a bucket below a prefix."""

    bucket: str
    prefix: str
    """Without a slash at its ends."""

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"


ModelUri = HubUri | S3Uri


def parse_uri(text: str) -> ModelUri:
    """Read a URI.

    Raises:
        RefusedError: it is none, or one of a kind that isn't fetched.
    """
    if found := _HUB.fullmatch(text):
        return HubUri(found["repo"], found["revision"])
    if found := _S3.fullmatch(text):
        return S3Uri(found["bucket"], found["prefix"])
    scheme = text.partition("://")[0]
    why = _NOTHING_TO_FETCH.get(scheme)
    raise RefusedError(
        f"{text}: {why}" if why else f"{text!r} is not hf://org/name[@revision] or s3://bucket/path"
    )


_TORCH = {".bin", ".pt", ".pth", ".ckpt"}
_OTHERS = {".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".gguf", ".tflite", ".npz", ".mlmodel"}
_COPIES = _TORCH | _OTHERS
"""What holds the same weights again where safetensors are."""
_WEIGHTS = _COPIES | {".safetensors"}
_COPY_FOLDERS = frozenset({"original", "metal", "onnx", "openvino", "coreml", "gguf"})
"""Folders in which publishers put the same weights for other programs."""
_VARIANTS = (".fp16", ".bf16", ".fp32", ".non_ema")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file of a model."""

    name: str
    """Its path below the model, with slashes."""
    size: int
    """Bytes."""
    tag: str
    """Changes with the content: an entity tag or a blob's id."""
    sha256: str | None = None
    """Of the content, where the source tells it."""
    git_sha1: str | None = None
    """Of the content as a blob of git, where the source tells it."""


@dataclass(frozen=True, slots=True)
class Listing:
    """A model's files at one moment."""

    revision: str
    """Names that moment: a commit, or a digest of names, sizes and tags."""
    files: Sequence[RemoteFile]


class Source(Protocol):
    """Where a model comes from. `download` is called by several threads at once."""

    def listing(self, revision: str | None) -> Listing:
        """List the files of a revision that was listed before, or of the URI's own.

        Raises:
            FetchError: it can't be had.
        """

    def download(
        self, file: RemoteFile, directory: Path, revision: str, report: Callable[[int], None]
    ) -> None:
        """Write a file to its place below ``directory``, where it appears complete or not at all.

        ``report`` is called with how many further bytes are there; fewer than 0: they are lost.

        Raises:
            FetchError: it can't be had.
            OSError: the disk is full, or isn't writable.
        """


def checked(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Return the files, sorted, without those that have the names of what Millstream writes.

    Such files are in a bucket that somebody filled with a directory of ours.

    Raises:
        RefusedError: a name or a size can't be one of a file below the directory, or there are no
            files.
    """
    ours = (".millstream-", ".cache/")  # of `state`, and what is kept during a download
    found = [file for file in files if not _checked_name(file.name).startswith(ours)]
    found.sort(key=lambda file: file.name)
    names = {file.name for file in found}
    for file in found:
        if not isinstance(file.size, int) or file.size < 0:
            raise RefusedError(f"{file.name} has no size, but {file.size!r}")
        for folder in PurePosixPath(file.name).parents:
            if str(folder) in names:
                raise RefusedError(f"{folder} is a file, and the folder of {file.name}")
    if len(names) < len(found):
        raise RefusedError("two files have the same name")
    if not found:
        raise RefusedError("there are no files")
    return found


def _checked_name(name: str) -> str:
    # Printable names have no surrogates either, which UTF-8 lacks.
    if not isinstance(name, str) or not name or not name.isprintable():
        raise RefusedError(f"the file name {name!r} has characters that no name should have")
    if "\\" in name or {"", ".", ".."}.intersection(name.split("/")):
        raise RefusedError(f"the file name {name!r} leads out of the model's directory")
    return name


def without_weights(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Keep configurations, tokenizer and templates: all that the Processor reads."""
    return [file for file in _ours(files) if not _is_weights(file)]


def wanted(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Leave out files that hold weights a second time, for other programs."""
    given = _ours(files)
    tensors = {file.name for file in given if file.name.endswith(".safetensors")}
    if not tensors:
        return given
    folders = {str(PurePosixPath(name).parent) for name in tensors}
    is_pipeline = any(file.name == "model_index.json" for file in given)
    return [file for file in given if not _is_copy(file, tensors, folders, is_pipeline=is_pipeline)]


def _ours(files: Iterable[RemoteFile]) -> list[RemoteFile]:
    """Leave out what belongs to the place and not to the model."""
    return [file for file in files if not PurePosixPath(file.name).name.startswith(".git")]


def _is_weights(file: RemoteFile) -> bool:
    return PurePosixPath(file.name).suffix in _WEIGHTS or file.name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def _is_copy(file: RemoteFile, tensors: set[str], folders: set[str], *, is_pipeline: bool) -> bool:
    path = PurePosixPath(file.name)
    folder = str(path.parent)
    if path.parts[0] in _COPY_FOLDERS and any("/" not in name for name in tensors):
        return True
    if is_pipeline and folder == "." and path.suffix in _WEIGHTS:
        return True  # a pipeline's weights are in its folders; the root has them once more
    if path.suffix in _COPIES or file.name.endswith(".bin.index.json"):
        return folder in folders
    if file.name not in tensors:
        return False
    if path.name.startswith("consolidated"):
        others = map(PurePosixPath, tensors)
        return any(o.parent == path.parent and o.name.startswith("model") for o in others)
    return any(
        variant in path.name and str(path.with_name(path.name.replace(variant, ""))) in tensors
        for variant in _VARIANTS
    )


_BLOCK = 2**20


def content_differs(file: RemoteFile, path: Path) -> str | None:
    """Compare a file with the hash that its source tells; return what differs, in words."""
    size = path.stat().st_size
    if size != file.size:
        return f"it has {size} bytes instead of {file.size}"
    if file.sha256:
        found, name, expected = hashlib.sha256(), "SHA-256", file.sha256
    elif file.git_sha1:
        found, name, expected = hashlib.sha1(usedforsecurity=False), "blob id", file.git_sha1
        found.update(b"blob %d\0" % size)
    else:
        return None
    with path.open("rb") as content:
        while block := content.read(_BLOCK):
            found.update(block)
    digest = found.hexdigest()
    return None if digest == expected else f"its {name} is {digest} instead of {expected}"
