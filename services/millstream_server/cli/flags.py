"""Flags that several commands have: a server, TLS, keys; and why a connection fails.

It imports little: a container's probe uses it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""
NEEDS_EXTRA = "the millstream command needs further packages: pip install 'millstream[cli]'"
WRONG_USAGE = 2
"""Exit code where a wrong flag isn't a failure of what is checked."""
KEY_VARIABLE = "MILLSTREAM_API_KEY"
ADMIN_KEY_VARIABLE = "MILLSTREAM_ADMIN_KEY"

_KEY = re.compile(r"[!-~]+")
"""Visible ASCII, as metadata takes it."""
_TLS_FILES = {
    "--tls-ca-file": "PEM CAs of the server's certificate",
    "--tls-cert-file": "PEM certificate to show (mTLS)",
    "--tls-key-file": "PEM private key of that certificate",
}
DEFAULT_ADDRESS = "127.0.0.1:50051"
ADDRESS_VARIABLE = "MILLSTREAM_ADDRESS"
MODEL_HELP = "model to ask, or an alias (default: the task's, as `millstream models` shows)"
DEFAULT_LOG_DIR = Path(".millstream/logs")
"""Of `up`."""
Commands: TypeAlias = "argparse._SubParsersAction[Any]"  # noqa: SLF001 - it has no public name


@dataclass(frozen=True, slots=True)
class Destination:
    """A server, and how to connect to it."""

    address: str
    tls: bool = False
    ca_file: Path | None = None
    """None: the CAs that gRPC knows."""
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""
    api_key: str = field(default="", repr=False)
    allow_plaintext_key: bool = False

    @property
    def expected_name(self) -> str:
        """The name that the server's certificate must hold."""
        host = self.address.rpartition("/")[2].rpartition(":")[0]
        return self.server_name or host.strip("[]")


def flag(parser: argparse._ActionsContainer, usage: str, help_: str, **more: Any) -> None:
    """Add an argument; ``usage`` is what help shows, such as "--seed N". A flag alone is a switch.

    ``more`` is argparse's; it wins over the type that the usage stands for. Of a flag's ``choices``
    the first is the default. Help tells a default, unless it is nothing or told in words.
    """
    names = usage.split()
    if len(names) > 1 and not names[-1].startswith("-"):
        metavar = names.pop()
        more = {"metavar": metavar, "type": _TYPES.get(metavar), **more}
    elif not more:
        more = {"action": "store_true"}
    elif usage.startswith("-") and set(more) == {"choices"}:
        more = {"default": more["choices"][0], **more}
    default = more.get("default")
    if usage.startswith("-") and default and isinstance(default, (str, int, float, Path)):
        help_ = help_ if "(default:" in help_ else f"{help_} (default: %(default)s)".strip()
    parser.add_argument(*names, help=help_, **more)


def flags(parser: argparse._ActionsContainer, table: Mapping[str, str], **more: Any) -> None:
    """Add several: each usage with its help."""
    for usage, help_ in table.items():
        flag(parser, usage, help_, **more)


def add_tls(parser: argparse.ArgumentParser) -> None:
    """Add the flags for TLS."""
    group = parser.add_argument_group("TLS", "each of these flags turns it on")
    flag(group, "--tls", "check by the CAs that gRPC knows")
    flags(group, {f"{name} FILE": what for name, what in _TLS_FILES.items()})
    flag(
        group,
        "--tls-server-name NAME",
        "name in the server's certificate, if it isn't HOST",
        default="",
    )


def tls_name_of(entries: str) -> str:
    """Return what the chart's certificates are for, of "k8s:NAMESPACE/SERVICE" or "dns:…"."""
    if found := re.search(r"k8s:([-a-z0-9]+)/([-a-z0-9]+)", entries):
        return f"{found[2]}.{found[1]}.svc"
    found = re.search(r"dns:([-a-z0-9.]+\.svc)\b", entries)
    return found[1] if found else ""


def add_connection(parser: argparse.ArgumentParser) -> None:
    """Add the flags for TLS and for the API key."""
    add_tls(parser)
    group = parser.add_argument_group(
        "API key", f"for servers that require one; the flag wins over {KEY_VARIABLE}"
    )
    flag(group, "--api-key-file FILE", "file that holds the API key alone")
    allowed = "send the key without TLS to another machine, on a network that is trusted"
    flag(group, "--allow-plaintext-key", allowed)


def read_tls(args: argparse.Namespace) -> Destination:
    """Return the destination of a command that has the flags of `add_tls`.

    Raises:
        ValueError: a file can't be read, isn't what its flag says, or a flag is missing.
    """
    files = (args.tls_ca_file, args.tls_cert_file, args.tls_key_file)
    tls = bool(args.tls or args.tls_server_name or any(files))
    server = Destination(args.address, tls, *files, server_name=args.tls_server_name)
    _check_files(server)
    return server


def read_connection(args: argparse.Namespace) -> Destination:
    """Return the destination of a command that has the flags of `add_connection`.

    Raises:
        ValueError: as `read_tls`; or there is no key in its file or variable.
    """
    key = _read_key(args.api_key_file)
    return replace(read_tls(args), api_key=key, allow_plaintext_key=args.allow_plaintext_key)


def read_admin_key() -> str:
    """Return the key of an admin port that isn't of a suite of `up`; empty: there is none.

    Raises:
        ValueError: the variable holds no key.
    """
    return _checked_key(ADMIN_KEY_VARIABLE, os.environ.get(ADMIN_KEY_VARIABLE, ""))


def refuse_plaintext_key(server: Destination, *, loopback: bool) -> None:
    """Check that nobody on the network can read the API key, or that it is allowed.

    Raises:
        ValueError: it would be sent unencrypted to another machine.
    """
    if server.api_key and not (server.tls or loopback or server.allow_plaintext_key):
        raise ValueError(
            f"the API key would be sent to {server.address} unencrypted: give --tls-ca-file (or "
            "--tls), or, on a network that is trusted, --allow-plaintext-key"
        )


def _read_key(file: Path | None) -> str:
    source, text = KEY_VARIABLE, os.environ.get(KEY_VARIABLE, "")
    if file is not None:
        source = f"--api-key-file: {file}"
        text = _read("--api-key-file", file).decode(errors="replace")
        if not text.strip():
            raise ValueError(f"{source} is empty")
    return _checked_key(source, text)


def _checked_key(source: str, text: str) -> str:
    key = text.strip()
    if key and not _KEY.fullmatch(key):
        raise ValueError(f"{source} must hold an API key alone: one line of visible ASCII")
    return key


def _read(flag: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"{flag}: {file} can't be read: {error.strerror}") from error


def _check_files(server: Destination) -> None:
    """Check the files before gRPC does, which says of none what is wrong with it."""
    files = (server.ca_file, server.cert_file, server.key_file)
    for name, file in zip(_TLS_FILES, files, strict=True):
        if file is not None:
            _read(name, file)
    for name, file in (("--tls-ca-file", server.ca_file), ("--tls-cert-file", server.cert_file)):
        if file is not None:
            _check_certificate(name, file)
    if server.cert_file is None and server.key_file is None:
        return
    if server.cert_file is None or server.key_file is None:
        missing = "--tls-key-file" if server.key_file is None else "--tls-cert-file"
        raise ValueError(
            f"--tls-cert-file and --tls-key-file belong together; {missing} is missing"
        )
    _check_pair(server.cert_file, server.key_file)


def _check_certificate(flag: str, file: Path) -> None:
    import ssl  # noqa: PLC0415 - not for every probe

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
    except ssl.SSLError as error:
        raise ValueError(f"{flag}: {file} holds no valid PEM certificate{_why(error)}") from error


def _check_pair(cert: Path, key: Path) -> None:
    import ssl  # noqa: PLC0415

    def no_passphrase() -> str:
        raise ValueError(f"--tls-key-file: {key} is encrypted; gRPC needs it without a passphrase")

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.load_cert_chain(cert, key, password=no_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ValueError(
                f"--tls-key-file: {key} isn't the key of the certificate in {cert}"
            ) from error
        raise ValueError(
            f"--tls-key-file: {key} holds no valid PEM private key{_why(error)}"
        ) from error


def _why(error: OSError) -> str:
    reason = getattr(error, "reason", None)
    return f" ({reason.replace('_', ' ').lower()})" if reason else ""


def explain_tls(details: str, server: Destination) -> str | None:
    """Return why TLS, or its absence, kept a connection from being made; None: another cause.

    ``details`` are those of a call that failed.
    """
    text = details.lower()
    if "failed to connect" not in text:
        return None
    return next((why for sign, why in _tls_failures(server).items() if sign in text), None)


def _tls_failures(server: Destination) -> dict[str, str]:
    """Return what gRPC's details may contain, and what it means; the first that fits counts."""
    address = server.address
    another_name = f"the certificate of {address} isn't for {server.expected_name}: give "
    another_name += "--tls-server-name a name that it holds"
    another_ca = f"no CA of {server.ca_file or 'those that gRPC knows'} signed the certificate of "
    another_ca += f"{address}: give --tls-ca-file the file of the CA that did"
    return {
        "hostname verification check failed": another_name,
        "wrong_version_number": f"{address} doesn't serve TLS: leave the --tls flags out",
        "certificate has expired": f"the certificate of {address} has expired",
        "certificate_verify_failed": another_ca,
        "socket closed": _closed_at_once(server),
        "connection reset": _closed_at_once(server),
        "handshake failed": f"the TLS handshake with {address} failed",
    }


def _closed_at_once(server: Destination) -> str:
    closed = f"{server.address} closes connections at once; "
    if not server.tls:
        return closed + "if it serves TLS, give --tls-ca-file, or --tls"
    if server.cert_file is None:
        return closed + "if it requires a client certificate, give --tls-cert-file, --tls-key-file"
    return closed + f"perhaps it doesn't accept the certificate in {server.cert_file}"


def fail(why: object, code: int = 1) -> int:
    """Print an error; return the exit code."""
    print(f"error: {why}", file=sys.stderr)
    return code


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    """Add a command; ``run`` is its function, ``text`` its help around the flags.

    The text's first line is what a list of commands says; from "examples:" on it follows the flags.
    """
    description, examples, lines = text.partition("examples:\n")
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text.partition("\n")[0],
        description=description,
        epilog=examples + lines,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def add_model_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names a model's directory."""
    flag(parser, "--model DIR", "model directory (default: demo/model)")


def add_address(
    parser: argparse.ArgumentParser,
    what: str = "the suite's Processor",
    otherwise: str = DEFAULT_ADDRESS,
) -> None:
    """Add the flag that names a server; it wins over the variable, that over ``otherwise``."""
    default = os.environ.get(ADDRESS_VARIABLE) or otherwise
    told = f"{ADDRESS_VARIABLE}, else {otherwise or 'that of `millstream up`'}"
    flag(parser, "--address HOST:PORT", f"{what} (default: {told})", default=default)


def add_processor(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name the Processor and say how to connect to it."""
    add_address(parser)
    add_connection(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Add the flags of commands that send requests."""
    add_processor(parser)
    flag(parser, "--model NAME", MODEL_HELP, default="")
    flag(parser, "--show-usage", "print times and token counts to stderr")


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag that prints JSON in place of a table."""
    flag(parser, "--json", f"print {what} as JSON, one a line")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the server to look at, as a flag and as a word of its own.

    `add_connection` has the flags that go with it.
    """
    add_address(parser, "the server")
    flag(parser, "address HOST:PORT", "the same as --address", nargs="?", default=argparse.SUPPRESS)


def add_log_dir(parser: argparse.ArgumentParser | argparse._ArgumentGroup, what: str) -> None:
    """Add the flag that names the directory of a suite's logs, by which it is found."""
    flag(parser, "--log-dir DIR", what, default=DEFAULT_LOG_DIR)


def add_timeout(parser: argparse.ArgumentParser, default_s: float | None, what: str) -> None:
    """Add the flag that bounds each call; ``what`` is bounded, None: without limit."""
    told = what if default_s else f"{what} (default: no limit)"
    flag(parser, "--timeout-s SECONDS", told, default=default_s)


def positive_seconds(text: str) -> float:
    """Parse a flag's number of seconds.

    Raises:
        argparse.ArgumentTypeError: it is none, or not above zero.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def whole_number(most: int, least: int = 0) -> Callable[[str], int]:
    """Make an argparse type that refuses values out of range."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdecimal() and least <= int(text) <= most):
            message = f"{text!r} is not a whole number from {least} to {most}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return parse


_TYPES: Mapping[str, Callable[[str], Any]] = {
    "N": int,
    "X": float,
    "FILE": Path,
    "DIR": Path,
    "SECONDS": positive_seconds,
}
"""What stands behind a flag, as its type."""
