"""Listening sockets of an address, as gRPC binds them, and who is at their other ends."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millstream_server.runtime.rpc.call import CertificateName

_TCP = re.compile(r"(?P<host>[^\s:/\[\]]+|\[[^\s\[\]]+\]):(?P<port>\d{1,5})")
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 - what the settings' default says
_UNIX = "unix:"
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT})
_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""A FIN or an RST has come, also behind what isn't read yet; Linux alone tells of a FIN."""
_TRIES = 5
"""For port 0 with several addresses: the port that the first was given may be taken at the next."""


@dataclass(slots=True)
class Listening:
    """Sockets that listen, one per address that the host's name has."""

    sockets: list[socket.socket] = field(default_factory=list)
    port: int = 0
    """0 for a Unix socket."""
    unlink: tuple[Path, int] | None = None
    """The path of a Unix socket and its inode."""

    def close(self) -> None:
        """Listen no more; remove a Unix socket's file, unless it is another process's by now."""
        for each in self.sockets:
            each.close()
        if self.unlink is not None:
            path, inode = self.unlink
            with contextlib.suppress(OSError):
                if path.lstat().st_ino == inode:
                    path.unlink()


def listen_on(address: str, *, backlog: int) -> Listening:
    """Listen on HOST:PORT, [IPv6]:PORT or unix:/path.

    A name is resolved, and all its addresses listened on. 0.0.0.0 and [::] both mean every address,
    IPv4 and IPv6 where the machine has it. With port 0 the system picks one. A Unix socket is for
    its owner only (mode 0600). No other process can listen on the same port.

    Raises:
        OSError: the address can't be bound.
    """
    try:
        if address.startswith(_UNIX):
            return _unix(address.removeprefix(_UNIX), backlog)
        return _tcp(address, backlog)
    except OSError as error:
        message = f"can't listen on {address}: is the port taken?"
        if error.errno not in {errno.EADDRINUSE, None}:
            message = f"can't listen on {address}: {error.strerror or error}"
        raise OSError(message) from error


def _tcp(address: str, backlog: int) -> Listening:
    parts = _TCP.fullmatch(address)
    if parts is None:
        raise OSError(errno.EINVAL, "it is not HOST:PORT, [IPv6]:PORT or unix:/path")
    host, port = parts["host"].strip("[]"), int(parts["port"])
    if host in _WILDCARDS:
        return _all_addresses(port, backlog)
    for _ in range(_TRIES - 1):
        try:
            return _by_name(host, port, backlog)
        except OSError as error:
            if port or error.errno != errno.EADDRINUSE:
                raise
    return _by_name(host, port, backlog)


def _all_addresses(port: int, backlog: int) -> Listening:
    try:
        bound = _bound(socket.AF_INET6, ("::", port), both=True)
    except OSError as error:
        if error.errno not in _NO_IPV6:
            raise
        bound = _bound(socket.AF_INET, ("0.0.0.0", port))  # noqa: S104
    bound.listen(backlog)
    return Listening([bound], bound.getsockname()[1])


def _by_name(host: str, port: int, backlog: int) -> Listening:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made = Listening(port=port)
    absent: OSError | None = None
    try:
        for family, _, _, _, where in dict.fromkeys(found):
            try:
                bound = _bound(family, (where[0], made.port, *where[2:]))
            except OSError as error:
                if error.errno not in _NO_IPV6:
                    raise
                absent = error  # such as ::1 of "localhost" on a machine without IPv6
                continue
            made.sockets.append(bound)
            made.port = bound.getsockname()[1]
            bound.listen(backlog)
    except BaseException:
        made.close()
        raise
    if not made.sockets:
        raise absent or OSError(errno.EADDRNOTAVAIL, "the name has no address")
    return made


def _bound(family: int, where: Any, *, both: bool = False) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setblocking(False)  # noqa: FBT003 - the library's signature
        # Bind while connections of the process before are still in TIME_WAIT. Never SO_REUSEPORT:
        # two servers would share a port instead of the second failing.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if both else 1)
        made.bind(where)
    except BaseException:
        made.close()
        raise
    return made


def _unix(name: str, backlog: int) -> Listening:
    path = Path(name.removeprefix("//"))
    _remove_stale(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)  # noqa: FBT003
        made.bind(str(path))
        path.chmod(0o600)  # nobody can connect before `listen`
        made.listen(backlog)
        return Listening([made], unlink=(path, path.lstat().st_ino))
    except BaseException:
        made.close()
        raise


def _remove_stale(path: Path) -> None:
    """Remove the socket that a process left behind; anything else stays.

    Raises:
        OSError: somebody listens there, or it is no socket.
    """
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise OSError(errno.EEXIST, "there is a file of that name that is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # noqa: FBT003
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # its queue of connections is full
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def peer_name(sockaddr: Any) -> str:
    """Return an address of a socket's other end as gRPC writes it: ipv4:127.0.0.1:4711."""
    if not isinstance(sockaddr, tuple):
        return "unix:"
    host, port = sockaddr[:2]
    if host.startswith("::ffff:") and "." in host:
        host = host.removeprefix("::ffff:")
    return f"ipv6:%5B{host}%5D:{port}" if ":" in host else f"ipv4:{host}:{port}"


def certificate_names(transport: Any) -> Sequence[CertificateName] | None:
    """Return the names in the certificate that the other end has shown; None: it has shown none."""
    secured = transport.get_extra_info("ssl_object")
    der = secured.getpeercert(binary_form=True) if secured is not None else None
    return None if der is None else names_in(der)


def names_in(der: bytes) -> Sequence[CertificateName]:
    """Return the URI and DNS entries of a certificate; none if it is malformed.

    The handshake has checked its signature, not that each part of it can be read.
    """
    # Here, since it takes 8 MB: it is needed once a caller has shown a certificate.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415

    try:
        extensions = x509.load_der_x509_certificate(der).extensions
        found = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = found.get_values_for_type(x509.DNSName)
    except (
        ValueError,
        TypeError,
        UnsupportedAlgorithm,
        x509.InvalidVersion,
        x509.DuplicateExtension,
        x509.ExtensionNotFound,
        x509.UnsupportedGeneralNameType,
    ):
        return []
    return [
        *(CertificateName("uri", name) for name in uris),
        *(CertificateName("dns", name) for name in hosts),
    ]


def peer_has_closed(transport: Any, events: int = _CLOSED) -> bool:
    """Return whether a connection's peer has closed it, whatever it sent before is still unread.

    With POLLIN as ``events``: whether anything waits to be read.
    """
    own = transport.get_extra_info("socket")
    if own is None or own.fileno() < 0:
        return True
    poll = select.poll()
    poll.register(own.fileno(), events)
    return bool(poll.poll(0))
