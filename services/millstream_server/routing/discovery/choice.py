"""Makes the discovery that `--workers` asks for."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from millstream_server.routing.discovery.base import Discovery, checked_address
from millstream_server.routing.discovery.dns import DnsDiscovery
from millstream_server.routing.discovery.file import FileDiscovery
from millstream_server.routing.discovery.merged import MergedDiscovery
from millstream_server.routing.discovery.static import StaticDiscovery
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.settings.declare import is_port

_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES_NAME = re.compile(rf"(?:(?P<namespace>{_LABEL})/)?(?P<service>{_LABEL})")


def make_discovery(workers: Sequence[str]) -> Discovery:
    """Make the discovery for the entries of `--workers`; several are merged.

    An entry is HOST:PORT, dns:NAME:PORT, k8s:SERVICE, k8s:NAMESPACE/SERVICE or file:PATH.

    Raises:
        SettingsError: one is none of these, its file can't be read, or this is no cluster.
    """
    if not workers:
        raise SettingsError("--workers: name at least one worker, HOST:PORT,…")
    listed: list[str] = []
    sources: list[Discovery] = []
    for entry in dict.fromkeys(workers):
        kind, _, rest = entry.partition(":")
        if (make := _KINDS.get(kind)) and not (rest.isdecimal() and is_port(rest)):
            sources.append(make(rest))
        else:
            listed.append(checked_address(entry))
    if listed:
        sources.insert(0, StaticDiscovery(listed))
    return sources[0] if len(sources) == 1 else MergedDiscovery(sources)


def _dns(rest: str) -> DnsDiscovery:
    host, _, port = rest.rpartition(":")
    if not host or "/" in rest or not is_port(port):
        raise SettingsError(f"--workers: 'dns:{rest}' is not dns:NAME:PORT")
    return DnsDiscovery(host, int(port))


def _file(rest: str) -> FileDiscovery:
    if not rest:
        raise SettingsError("--workers: 'file:' needs a path, file:PATH")
    return FileDiscovery(Path(rest))


def _kubernetes(rest: str) -> Discovery:
    # Imported where it is used: its HTTP client takes 9 MB.
    from millstream_server.routing.discovery.kubernetes import KubernetesDiscovery  # noqa: PLC0415

    name = _KUBERNETES_NAME.fullmatch(rest)
    if name is None:
        raise SettingsError(
            f"--workers: 'k8s:{rest}' is not k8s:SERVICE or k8s:NAMESPACE/SERVICE; "
            "the port is the service's own, named grpc"
        )
    return KubernetesDiscovery(name["service"], name["namespace"] or "")


_KINDS: dict[str, Callable[[str], Discovery]] = {
    "dns": _dns,
    "file": _file,
    "k8s": _kubernetes,
}
