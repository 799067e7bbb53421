"""URIs of models: hf://org/name[@revision] and s3://bucket/prefix."""

from __future__ import annotations

import re
from dataclasses import dataclass

from millstream_server.model_files.errors import RefusedError

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
        """Spell the URI."""
        return f"hf://{self.repo}" + (f"@{self.revision}" if self.revision else "")


@dataclass(frozen=True, slots=True)
class S3Uri:
    """All objects of a bucket below a prefix."""

    bucket: str
    prefix: str
    """Without a slash at its ends."""

    def __str__(self) -> str:
        """Spell the URI."""
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
