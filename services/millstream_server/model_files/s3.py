"""Models from S3, or a server with its API (`AWS_ENDPOINT_URL`)."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

from millstream_server.model_files.source import (
    FailedError,
    FetchError,
    Listing,
    RefusedError,
    RemoteFile,
    S3Uri,
    checked,
)

PARTS = ".cache/s3"
"""Where files are until they are complete."""
_BLOCK = 2**20
_CONNECTIONS = 32


class S3:
    """All objects below a prefix."""

    def __init__(self, uri: S3Uri) -> None:
        """Use the credentials, region and endpoint that boto3 finds by itself.

        Raises:
            RefusedError: boto3 isn't installed, or no region or endpoint can be used.
        """
        self._uri = uri
        try:
            boto3: Any = importlib.import_module("boto3")
        except ModuleNotFoundError as error:
            raise RefusedError(
                f"{uri}: s3:// needs boto3: pip install 'millstream[processor,s3]'"
            ) from error
        config: Any = importlib.import_module("botocore.config")
        self._errors: Any = importlib.import_module("botocore.exceptions")
        http: Any = importlib.import_module("urllib3.exceptions")
        self._failures = (self._errors.BotoCoreError, self._errors.ClientError, http.HTTPError)
        try:
            self._client: Any = boto3.client(
                "s3",
                config=config.Config(
                    max_pool_connections=_CONNECTIONS, retries={"mode": "standard"}
                ),
            )
        except (self._errors.BotoCoreError, ValueError) as error:
            raise RefusedError(f"can't ask for {uri}: {error}") from error

    def listing(self, revision: str | None) -> Listing:
        """List the objects. S3 has no revisions: the digest of the list stands for one."""
        try:
            files = checked(self._objects())
        except self._failures as error:
            raise self._explained(error) from error
        except RefusedError as error:
            raise RefusedError(f"{self._uri}: {error}") from error
        digest = hashlib.sha256()
        for file in files:
            digest.update(f"{file.name}\0{file.size}\0{file.tag}\n".encode())
        return Listing(digest.hexdigest(), files)

    def _objects(self) -> Iterator[RemoteFile]:
        prefix = f"{self._uri.prefix}/"
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._uri.bucket, Prefix=prefix):
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):  # a folder that some tools make
                    name = found["Key"].removeprefix(prefix)
                    yield RemoteFile(name, found.get("Size", -1), found.get("ETag", "").strip('"'))

    def download(
        self, file: RemoteFile, directory: Path, revision: str, report: Callable[[int], None]
    ) -> None:
        """Write the object beside its place, from where an earlier attempt stopped; then move."""
        # The tag is the server's: as it is, it could lead out of the directory.
        part = directory / PARTS / hashlib.sha256(f"{file.name}\0{file.tag}".encode()).hexdigest()
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as out:
            if (there := out.tell()) > file.size:
                out.truncate(0)
                there = 0
            report(there)
            if there < file.size:
                self._append(file, there, out.write, report)
        place = directory / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        part.replace(place)

    def _append(
        self,
        file: RemoteFile,
        there: int,
        write: Callable[[bytes], int],
        report: Callable[[int], None],
    ) -> None:
        try:
            found = self._client.get_object(
                Bucket=self._uri.bucket,
                Key=f"{self._uri.prefix}/{file.name}",
                Range=f"bytes={there}-",
                IfMatch=f'"{file.tag}"',
            )
            for block in found["Body"].iter_chunks(_BLOCK):
                write(block)
                report(len(block))
        except self._failures as error:
            raise self._explained(error) from error

    def _explained(self, error: BaseException) -> FetchError:
        uri = self._uri
        if isinstance(error, self._errors.NoCredentialsError):
            return RefusedError(
                f"{uri}: there are no credentials. Set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, or give the pod a role"
            )
        reply = getattr(error, "response", {})
        status = reply.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = reply.get("Error", {}).get("Code", "")
        if status in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
            return FailedError(f"{uri} was changed while it was downloaded ({code})")
        if code == "NoSuchBucket":
            return RefusedError(f"there is no bucket {uri.bucket}")
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return RefusedError(
                f"S3 refuses {uri} ({code}): the credentials need s3:ListBucket on the bucket and "
                "s3:GetObject below the prefix"
            )
        return FailedError(f"can't get {uri}: {error}. AWS_ENDPOINT_URL names another endpoint")
