"""Models from the Hugging Face Hub, or a server with its API (`HF_ENDPOINT`)."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from millstream_server.model_files.source import (
    FailedError,
    FetchError,
    HubUri,
    Listing,
    RefusedError,
    RemoteFile,
    checked,
)

CACHE = ".cache/huggingface"
"""What the library keeps in a directory while it fills it."""


class Hub:
    """A repository: one revision, fetched file by file with the Hub's own library."""

    def __init__(self, uri: HubUri) -> None:
        """Use the token of `HF_TOKEN`, or of the library's login."""
        # Bars of the library would fill the log with control codes.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        self._uri = uri
        # Imported here: it reads the environment, and `wait` doesn't need it.
        self._hub: Any = importlib.import_module("huggingface_hub")
        self._errors: Any = importlib.import_module("huggingface_hub.errors")
        self._failures = (
            self._errors.HTTPError,  # of the HTTP library, which differs between versions
            self._errors.XetDownloadError,
            OSError,
            RuntimeError,
            ValueError,
        )
        self._endpoint: str = importlib.import_module("huggingface_hub.constants").ENDPOINT

    def listing(self, revision: str | None) -> Listing:
        api = self._hub.HfApi()
        try:
            info = api.model_info(
                self._uri.repo, revision=revision or self._uri.revision, files_metadata=True
            )
            files = [_remote_file(found) for found in info.siblings]
        except self._failures as error:
            raise self._explained(error) from error
        except (AttributeError, KeyError, TypeError) as error:
            raise FailedError(
                f"{self._endpoint} doesn't answer like a Hugging Face Hub: {error!r}"
            ) from error
        return Listing(info.sha, checked(files))

    def download(
        self, file: RemoteFile, directory: Path, revision: str, report: Callable[[int], None]
    ) -> None:
        """Let the library write the file; it goes on where a connection broke."""
        _forget(directory, file.name)
        try:
            self._hub.hf_hub_download(
                self._uri.repo,
                file.name,
                revision=revision,
                local_dir=directory,
                tqdm_class=_counter(self._hub.utils.tqdm, report),
            )
        except self._failures as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> FetchError:
        cause = error
        while cause.__cause__ is not None and not isinstance(cause, self._errors.HfHubHTTPError):
            cause = cause.__cause__
        response = getattr(cause, "response", None)
        status: int | None = getattr(response, "status_code", None)
        if (refused := self._refused(cause, status)) is not None:
            return refused
        if status is not None:
            hint = "; HF_TOKEN has higher limits" if status == HTTPStatus.TOO_MANY_REQUESTS else ""
            return FailedError(f"{self._endpoint} replies {status} for {self._uri}{hint}")
        return FailedError(
            f"can't get {self._uri} from {self._endpoint}: {_first_line(cause)}. Does this "
            "machine reach it? HF_ENDPOINT names a mirror, HTTPS_PROXY a proxy; without a "
            "network, mount the files instead (pvc:// or oci:// in the chart)"
        )

    def _refused(self, error: BaseException, status: int | None) -> RefusedError | None:
        """Explain what another attempt doesn't change."""
        errors, uri = self._errors, self._uri
        page = f"{self._endpoint}/{uri.repo}"
        token = "HF_TOKEN" if self._hub.get_token() else "HF_TOKEN, which isn't set"
        if isinstance(error, errors.GatedRepoError):
            return RefusedError(
                f"{uri} is gated ({status}): accept its licence at {page} with the account of the "
                f"token in {token}, then try again. In the chart: models.<name>.tokenSecret"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return RefusedError(f"{uri.repo} has no revision {uri.revision!r}: see {page}/commits")
        if isinstance(error, errors.RepositoryNotFoundError) or status == HTTPStatus.NOT_FOUND:
            return RefusedError(
                f"there is no model {uri.repo} at {self._endpoint} ({status}), or it is private "
                f"and the token in {token} may not read it"
            )
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return RefusedError(
                f"{self._endpoint} refuses {uri} ({status}): is the token in {token} valid, and "
                "may it read this model?"
            )
        if isinstance(error, errors.HFValidationError):
            return RefusedError(f"{uri}: {_first_line(error)}")
        return None


def _remote_file(found: Any) -> RemoteFile:
    lfs = found.lfs
    return RemoteFile(
        name=found.rfilename,
        size=(lfs.size if lfs else found.size) or 0,
        tag=(lfs.sha256 if lfs else found.blob_id) or "",
        sha256=lfs.sha256 if lfs else None,
        git_sha1=None if lfs else found.blob_id,
    )


def _first_line(error: BaseException) -> str:
    """Say what is wrong without the library's advice, which is for its own command line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\s*\(Request ID:.*?\)", "", lines[0]) if lines else type(error).__name__


def _forget(directory: Path, name: str) -> None:
    """Remove what the library noted about a file, so that it asks for it again."""
    (directory / CACHE / "download" / f"{name}.metadata").unlink(missing_ok=True)


def _counter(bar: Any, report: Callable[[int], None]) -> Any:
    """Make a class that the library takes for its progress bar, and that only counts bytes."""

    class Counter(bar):  # type: ignore[misc]
        """One file's bytes on disk. With `update_transfer` the library makes one bar per file."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            report(int(n or 0))

        def update_transfer(self, n: int) -> None:
            pass

    return Counter
