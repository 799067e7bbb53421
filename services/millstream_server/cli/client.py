"""Uses the client library, and explains its failures in a terminal."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

import grpc

from millstream.v1 import worker_pb2
from millstream_client import NO_RETRY, Client, MillstreamError, Options, Tls
from millstream_client.errors import CONNECTION_LOST, SERVER_NOT_REACHED
from millstream_client.service_config import ONE_SERVER
from millstream_client.transport import parse_target
from millstream_server.cli.flags import (
    KEY_VARIABLE,
    Destination,
    explain_tls,
    fail,
    read_connection,
    refuse_plaintext_key,
)

# A person waits for a result, also from a suite that isn't ready: no retries and no health checks.
_OPTIONS = Options(service_config=ONE_SERVER, max_reconnect_pause_s=0.5)

ELSEWHERE = ("", SERVER_NOT_REACHED, CONNECTION_LOST, "UNKNOWN_METHOD")
"""Reasons of failures on the way, or of a server of another kind."""
_WORDS = {
    "guidance_scale": "--guidance",
    "n": "-n",
    "width": "--size",
    "height": "--size",
    "input_image": "--input",
    "prompt": "PROMPT",
    "text": "PROMPT",
    "inputs": "TEXT",
    "query": "QUERY",
    "documents": "DOCUMENT",
}
"""Fields whose flag, or word in a usage, has another name."""
_COMMANDS = {
    "ListModels": "`millstream models`",
    "use Complete": "use `millstream complete`",
    "use Chat": "use `millstream chat`",
}
_STARTERS = {
    "no model here makes images": "`make up ARGS=--all` starts one",
    "no model here embeds texts": "`make up ARGS=--all` starts one",
    "no model here ranks documents": "`make up ARGS=--all` starts one",
    "no encode worker": "`make up ARGS=--multimodal` starts one",
    "no model here makes videos": "README.md says how to start one",
    "takes no image": "`make up ARGS=--multimodal` starts one that does",
    "takes no video": "`make up ARGS=--multimodal` starts one that does",
}
"""What servers say is missing, and how it is started on this machine."""
_ROLES: Mapping[int, str] = {
    role: name.removeprefix("WORKER_ROLE_").lower()
    for name, role in worker_pb2.WorkerRole.items()
    if role
}
"""Without UNSPECIFIED; their numbers are in the order of a request's way."""


CONSTRAINTS = {"json-schema": "json_schema", "regex": "regex", "grammar": "ebnf"}
"""The flag of each kind of constraint."""


def connect(server: Destination) -> Client:
    """Make a client that reconnects to a restarted server within half a second.

    Raises:
        ValueError: the address is invalid, or the API key would be sent unencrypted.
        OSError: a TLS file can't be read.
    """
    refuse_plaintext_key(server, loopback=parse_target(server.address).loopback)
    tls = Tls(
        ca_file=server.ca_file,
        cert_file=server.cert_file,
        key_file=server.key_file,
        server_name=server.server_name,
    )
    return Client(
        server.address,
        api_key=server.api_key or None,
        tls=tls if server.tls else None,
        retry=NO_RETRY,
        options=replace(_OPTIONS, allow_plaintext_key=server.allow_plaintext_key),
    )


def call_processor(
    args: argparse.Namespace, use: Callable[[Client, Destination], Awaitable[int]]
) -> int:
    """Run ``use`` with a client of the server that the flags name; return its exit code.

    It is 1 after explaining a wrong flag or a failed call.
    """

    async def call() -> int:
        try:
            server = read_connection(args)
            client = connect(server)
        except (OSError, ValueError) as error:
            return fail(error)
        async with client:
            try:
                return await use(client, server)
            except MillstreamError as error:
                print_error(error, server, args)
                return 1

    return asyncio.run(call())


def print_error(
    error: MillstreamError, server: Destination, args: argparse.Namespace | None = None
) -> None:
    """Explain a failed call on stderr, in the words of the command with ``args``."""
    print("\n".join(explain(error, server, args)), file=sys.stderr)


def explain(
    error: MillstreamError, server: Destination, args: argparse.Namespace | None = None
) -> list[str]:
    """Return a failed call's lines: code, reason, message, invalid fields, what to do.

    Where a field has a flag of the command with ``args``, the flag is named instead.
    """
    if error.reason in ELSEWHERE:
        hint = explain_tls(error.message, server) or _network_hint(error, server.address)
        if hint:
            return [f"error: {hint}"]
    reason = f" ({error.reason})" if error.reason else ""
    said = [error.message, *error.unsaid()]
    for violation in error.violations:
        name = _name_of(violation.field, args)
        said = [text.replace(f"{violation.field}:", f"{name}:") for text in said]
    first, *more = map(_in_words, said)
    lines = [f"error: {error.code.name}{reason}: {first}{_starter(error, server)}"]
    lines += [f"  {text}" for text in more]
    if error.retry_delay_s is not None:
        soon = f"try again in {error.retry_delay_s:g} s" if error.retry_delay_s > 0 else ""
        lines.append(f"  {soon or 'trying again may help'}")
    if error.code is grpc.StatusCode.UNAUTHENTICATED and "certificate" not in error.message:
        lines.append(
            "  the server doesn't know this key; its file holds the key alone, without a name"
            if server.api_key
            else f"  give the key by --api-key-file, or in {KEY_VARIABLE}"
        )
    if error.error_id:
        lines.append(f"  the server's log has more under error id {error.error_id}")
    return lines


def _name_of(field: str, args: argparse.Namespace | None) -> str:
    """Return what a user wrote for a field of the request: a flag, or the word in its usage."""
    if args is None:
        return field
    if found := re.search(r"\.(image|video)\b", field):
        return f"--{found[1]}"
    parts = re.sub(r"\[\d+\]", "", field).split(".")
    if "messages" in parts:
        return field
    if word := next((_WORDS[part] for part in parts if part in _WORDS), ""):
        return word
    if parts[-1] == "constraint" and (given := vars(args).get("constraint")):
        return next(f"--{flag}" for flag, kind in CONSTRAINTS.items() if getattr(given, kind))
    return "--" + parts[-1].replace("_", "-") if parts[-1] in vars(args) else field


def _in_words(text: str) -> str:
    for ours, theirs in _COMMANDS.items():
        text = text.replace(ours, theirs)
    return text


def _starter(error: MillstreamError, server: Destination) -> str:
    """Return how to start what isn't there, if the suite is one of this machine."""
    if not parse_target(server.address).loopback:
        return ""
    return next((f"; {how}" for sign, how in _STARTERS.items() if sign in error.message), "")


def _network_hint(error: MillstreamError, address: str) -> str | None:
    text = error.message.lower()
    if error.code is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the server at {address} has no ProcessorService; "
            "give the Processor's address (workers have other ports)"
        )
    if error.reason == CONNECTION_LOST:
        return f"the connection to {address} broke; is the suite still running?"
    if error.reason != SERVER_NOT_REACHED:
        return None
    if "dns resolution failed" in text or "name resolution" in text:
        return f"{address} can't be found; give --address as HOST:PORT"
    return f"no server at {address}; start one with `millstream up`"


def role_name(role: int) -> str:
    """Return a role's name; a newer server may have roles that this command doesn't know."""
    return _ROLES.get(role, "unknown")


def role_order(role: int) -> int:
    """Return where a role stands in lists: in the order of a request's way."""
    return role if role in _ROLES else max(_ROLES) + 1
