"""EndpointSlices from a Kubernetes API server; the only module that imports its client library.

The library takes 24 MB and a quarter of a second of CPU, so it is imported when it is needed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp

from millstream_server.runtime.settings import SettingsError

if TYPE_CHECKING:
    from kubernetes.aio.client import ApiClient, Configuration

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod has its token, the CA of the API server, and its namespace."""
LIST_TIMEOUT_S = 30.0
WATCH_S = 60
"""A watch ends after this and is followed by the next, so that a dead connection is noticed."""
_WATCH_SLACK_S = 15.0
_SERVICE_LABEL = "kubernetes.io/service-name"

Slice = Mapping[str, Any]
"""An object of discovery.k8s.io/v1, as the API server sends it."""


class ApiError(Exception):
    """The API server wasn't reached, or didn't do as asked; the text says what to change."""


class ExpiredError(ApiError):
    """The API server no longer has the changes since the last one seen."""


@dataclass(frozen=True, slots=True)
class SliceEvent:
    """A change of one slice."""

    kind: str
    """ADDED, MODIFIED, DELETED, or BOOKMARK: no change."""
    slice: Slice
    version: str
    """The resource version to go on from."""


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """How to reach the API server: as the pod's service account, else by a kubeconfig file."""

    account: Path = SERVICE_ACCOUNT

    def check(self) -> None:
        """Check that there is a way, and that the library is installed.

        Raises:
            SettingsError: there is none.
        """
        try:
            from kubernetes.aio import config  # noqa: PLC0415 - not everybody needs it
        except ModuleNotFoundError as error:
            raise SettingsError(
                "--workers: k8s: needs further packages: pip install 'millstream[kubernetes]'"
            ) from error
        files = config.KUBE_CONFIG_DEFAULT_LOCATION
        if not self._in_cluster and not any(
            Path(file).expanduser().is_file() for file in files.split(":")
        ):
            raise SettingsError(
                f"--workers: k8s: needs a Kubernetes cluster: there is neither a service account's "
                f"token in {self.account} (automountServiceAccountToken) nor a kubeconfig "
                f"file {files}"
            )

    @property
    def _in_cluster(self) -> bool:
        return (self.account / "token").is_file()

    async def configure(self) -> tuple[Configuration, str]:
        """Return the client's configuration and the namespace that is meant if none is named.

        Raises:
            ApiError: a file doesn't say what it should.
        """
        from kubernetes.aio import client, config  # noqa: PLC0415
        from kubernetes.aio.config import incluster_config  # noqa: PLC0415

        configuration = client.Configuration()
        try:
            if not self._in_cluster:
                await config.load_kube_config(
                    client_configuration=configuration, persist_config=False
                )
                _, active = config.list_kube_config_contexts()
                return configuration, active["context"].get("namespace") or "default"
            # Reads the token anew every minute: it is replaced before it expires.
            incluster_config.InClusterConfigLoader(
                str(self.account / "token"), str(self.account / "ca.crt")
            ).load_and_set(configuration)
            return configuration, (self.account / "namespace").read_text().strip()
        except (config.ConfigException, OSError, ValueError, KeyError) as error:
            raise ApiError(f"no access to a cluster: {error}") from error

    @contextlib.asynccontextmanager
    async def open(self, service: str, namespace: str) -> AsyncIterator[SlicesApi]:
        """Connect for the slices of ``service``; an empty ``namespace`` is the default one.

        Raises:
            ApiError: there is no access.
        """
        from kubernetes.aio.client import ApiClient  # noqa: PLC0415

        configuration, default = await self.configure()
        try:
            client = ApiClient(configuration)
        except OSError as error:
            raise ApiError(f"no access to a cluster: {error}") from error
        async with client:
            yield SlicesApi(client, service, namespace or default)


class SlicesApi:
    """Lists and watches the EndpointSlices of one service."""

    def __init__(self, client: ApiClient, service: str, namespace: str) -> None:
        from kubernetes.aio.client.api.discovery_v1_api import DiscoveryV1Api  # noqa: PLC0415

        # Not the library's models: they refuse values that are newer than they are.
        self._request = DiscoveryV1Api(
            client
        ).list_namespaced_endpoint_slice_without_preload_content
        self._host = client.configuration.host
        self._service = service
        self.namespace = namespace

    async def list(self) -> tuple[dict[str, Slice], str]:
        """Return all slices by their names, and the version to watch from.

        Raises:
            ApiError: they weren't listed.
        """
        with self._explained(LIST_TIMEOUT_S):
            async with self._ask("list", LIST_TIMEOUT_S) as response:
                listed = json.loads(await response.read())
            found = {item["metadata"]["name"]: item for item in listed.get("items") or ()}
            return found, str(listed["metadata"]["resourceVersion"])

    @contextlib.asynccontextmanager
    async def watch(self, version: str) -> AsyncIterator[AsyncGenerator[SliceEvent, None]]:
        """Watch for changes after ``version``; the events end when the server says so.

        Raises:
            ExpiredError: the slices must be listed anew.
            ApiError: they can't be watched.
        """
        timeout_s = WATCH_S + _WATCH_SLACK_S
        asked = self._ask(
            "watch",
            timeout_s,
            watch=True,
            allow_watch_bookmarks=True,
            resource_version=version,
            timeout_seconds=WATCH_S,
        )
        with self._explained(timeout_s):
            async with (
                asked as response,
                contextlib.aclosing(self._events(response, timeout_s)) as events,
            ):
                yield events

    async def _events(
        self, response: aiohttp.ClientResponse, timeout_s: float
    ) -> AsyncGenerator[SliceEvent, None]:
        while True:
            with self._explained(timeout_s):
                line = await response.content.readline()
                if not line:
                    return
                event = self._event(json.loads(line))
            yield event

    def _event(self, sent: Mapping[str, Any]) -> SliceEvent:
        changed = sent["object"]
        if sent["type"] == "ERROR":
            raise self._refused("watch", changed.get("code"), changed.get("message"))
        version = str(changed["metadata"]["resourceVersion"])
        return SliceEvent(sent["type"], changed, version)

    @contextlib.asynccontextmanager
    async def _ask(
        self, verb: str, timeout_s: float, **parameters: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await self._request(
            self.namespace,
            label_selector=f"{_SERVICE_LABEL}={self._service}",
            _request_timeout=timeout_s,
            **parameters,
        )
        async with response:
            if response.status != HTTPStatus.OK:
                text = (await response.text(errors="replace"))[:2000]
                raise self._refused(verb, response.status, _message(text))
            yield response

    def _refused(self, verb: str, code: int | None, message: str | None) -> ApiError:
        if code == HTTPStatus.GONE:
            return ExpiredError(message)
        if code == HTTPStatus.UNAUTHORIZED:
            return ApiError(f"the API server {self._host} doesn't know these credentials (401)")
        if code == HTTPStatus.FORBIDDEN:
            return ApiError(
                f"the service account may not {verb} endpointslices in the namespace "
                f"{self.namespace}: it needs a Role there with apiGroups [discovery.k8s.io], "
                "resources [endpointslices], verbs [get, list, watch], and a RoleBinding"
            )
        return ApiError(f"the API server {self._host} replied {code}: {message}")

    @contextlib.contextmanager
    def _explained(self, timeout_s: float) -> Iterator[None]:
        """Turn failures of the connection and of the format into an `ApiError`."""
        try:
            yield
        except TimeoutError as error:
            raise ApiError(
                f"the API server {self._host} sent no end within {timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise ApiError(f"no connection to the API server {self._host}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ApiError(
                f"the API server {self._host} sent something else than EndpointSlices: {error!r}"
            ) from error


def _message(text: str) -> str:
    """Return the sentence of a Status object, or the text as it is."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip()
