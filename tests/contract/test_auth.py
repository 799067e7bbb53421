"""Who may call, over real sockets: API keys, client certificates, and what stays open."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from millstream_server.runtime.rpc.auth import AuthPolicy, PeerIdentities
from millstream_server.runtime.security.api_keys import ApiKeys
from millstream_server.runtime.security.tls import ClientTls, ServerTls, TlsFiles
from millstream_server.runtime.settings import SettingsError
from millstream_server.runtime.telemetry import log
from tests.support.telemetry.logged import fields_of
from tests.support.wire import transports
from tests.support.wire.certificates import Authority, Issued, SecretMount
from tests.support.wire.echo_service import SERVICE, SHAPES, answer, call, echoing, raw_call, start
from tests.support.wire.failures import Failure, refusal

KEY = "k-0123456789abcdef"
OTHER_KEY = "k-fedcba9876543210"
_ASKS_FOR_KEY = (
    "this server requires a valid API key; send it as the metadata 'authorization: Bearer KEY'"
)
_LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="")


def _bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def _sha256(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def _with_keys(inline: str = f"alice:{KEY}", file: Path | None = None) -> AuthPolicy:
    return AuthPolicy(keys=ApiKeys(file=file, inline=inline))


def _is_unauthenticated(failed: Failure) -> None:
    assert failed == Failure(
        code=grpc.StatusCode.UNAUTHENTICATED, message=_ASKS_FOR_KEY, reason="UNAUTHENTICATED"
    )


# ---- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_right_key_lets_in_and_names_the_caller(shape: str) -> None:
    async with echoing(_with_keys()) as served, served.channel() as channel:
        answered = await answer(call(channel, shape, metadata=_bearer(KEY)))
        assert served.echo.caller_key == "api_key:alice"
    assert answered == "hi api_key alice"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "metadata",
    [
        (),
        _bearer(OTHER_KEY),
        _bearer(KEY[:-1]),
        _bearer(KEY + "x"),
        _bearer(KEY.upper()),
        _bearer("alice"),
        _bearer(_sha256(KEY)),
        (("authorization", KEY),),
        (("authorization", f"Basic {KEY}"),),
        (*_bearer(KEY), *_bearer(OTHER_KEY)),
        (*_bearer(KEY), ("x-api-key", OTHER_KEY)),
        (("authorization-bin", KEY.encode()),),
    ],
)
async def test_without_a_right_key_nothing_is_reached(shape: str, metadata: Any) -> None:
    async with echoing(_with_keys()) as served, served.channel() as channel:
        _is_unauthenticated(await refusal(start(channel, shape, metadata=metadata)))
        assert served.echo.reached == 0


@pytest.mark.both_transports
@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
async def test_no_log_level_writes_a_key(level: str, capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        log.configure(level)
        async with echoing(_with_keys()) as served, served.channel() as channel:
            for metadata in (_bearer(KEY), _bearer(OTHER_KEY), (("x-api-key", KEY),)):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await call(channel, "Unary", metadata=metadata)
    finally:
        root.handlers[:], root.level = before
    said = capfd.readouterr().err
    assert KEY not in said
    assert OTHER_KEY not in said
    assert bool(said) is (level in ("debug", "info"))


@pytest.mark.both_transports
async def test_an_empty_key_is_named_as_such() -> None:
    """HTTP/2 doesn't take the blank at its end; grpc.aio does."""
    async with echoing(_with_keys()) as served, served.channel() as channel:
        failed = await refusal(call(channel, "Unary", metadata=_bearer("")))
        if transports.current() == "grpc":
            _is_unauthenticated(failed)
        else:
            assert failed.code is grpc.StatusCode.INTERNAL
            assert failed.message == "the value of 'authorization' begins or ends with a blank"
        assert served.echo.reached == 0


@pytest.mark.parametrize(
    "metadata",
    [
        (("authorization", f"bearer {KEY}"),),
        (("x-api-key", KEY),),
        (("authorization", "Basic a-proxys-own"), ("x-api-key", KEY)),
    ],
)
async def test_other_ways_to_send_a_key(metadata: Any) -> None:
    async with echoing(_with_keys()) as served, served.channel() as channel:
        assert await answer(call(channel, "Unary", metadata=metadata)) == "hi api_key alice"


async def test_keys_of_both_sources_count_and_a_name_may_have_two(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# people\n\nbob:{_sha256('b' * 16)}\n  alice:{'n' * 16}  \n")
    async with (
        echoing(_with_keys(f"alice:{KEY},carol:{OTHER_KEY}", file)) as served,
        served.channel() as channel,
    ):
        names = [
            await answer(call(channel, "Unary", metadata=_bearer(key)))
            for key in (KEY, "n" * 16, "b" * 16, OTHER_KEY)
        ]
    assert names == [f"hi api_key {name}" for name in ("alice", "alice", "bob", "carol")]


async def test_callers_at_the_same_time_keep_their_names() -> None:
    policy = _with_keys(f"alice:{KEY},bob:{OTHER_KEY}")
    async with echoing(policy) as served, served.channel() as channel:
        keys = [KEY, OTHER_KEY] * 50
        answers = await asyncio.gather(
            *(answer(call(channel, "Bidi", metadata=_bearer(key))) for key in keys)
        )
    assert answers == ["hi api_key alice", "hi api_key bob"] * 50


async def test_a_revoked_key_is_refused_on_the_next_rpc_and_a_new_one_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    mount = SecretMount(tmp_path / "mount")
    mount.put_files({"keys": f"alice:{KEY}\nbob:{OTHER_KEY}".encode()})
    async with (
        echoing(_with_keys("", mount.root / "keys")) as served,
        served.channel() as channel,
    ):
        assert await answer(call(channel, "Unary", metadata=_bearer(KEY)))
        mount.put_files({"keys": f"bob:{OTHER_KEY}\nalice:{'n' * 16}".encode()})
        _is_unauthenticated(await refusal(call(channel, "Unary", metadata=_bearer(KEY))))
        for key in (OTHER_KEY, "n" * 16):
            assert await answer(call(channel, "Unary", metadata=_bearer(key)))
    # grpc.aio may log something of its own meanwhile.
    written = [(r.getMessage(), r.__dict__.get("fields")) for r in caplog.records]
    assert KEY not in str(written)
    (changed,) = [r for r in caplog.records if r.message == "API keys changed"]
    assert fields_of(changed) == {"holders": "alice,bob"}


# ---- what is open, and what isn't ----------------------------------------------------------------


async def test_health_is_open_to_probes() -> None:
    async with echoing(_with_keys()) as served, served.channel() as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        assert (await stub.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(request)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize(
    ("policy", "metadata", "opens"),
    [
        (AuthPolicy(), (), True),
        (_with_keys(), (), False),
        (_with_keys(), _bearer(KEY), True),
    ],
)
async def test_reflection_is_open_where_all_is(
    policy: AuthPolicy,
    metadata: Any,
    opens: bool,  # noqa: FBT001
) -> None:
    async with echoing(policy) as served, served.channel() as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        if opens:
            asked = stub.ServerReflectionInfo(iter([_LIST_SERVICES]), metadata=metadata)
            listed = (await asked.read()).list_services_response.service
            assert health.SERVICE_NAME in [service.name for service in listed]
        else:
            _is_unauthenticated(await refusal(stub.ServerReflectionInfo(metadata=metadata)))


@pytest.mark.parametrize(
    "method",
    [
        f"/grpc.health.v1.Health/../{SERVICE}/Unary",
        f"/grpc.health.v1.Health/{SERVICE}/Unary",
        f"/{SERVICE}/../grpc.health.v1.Health/Check",
        f"//{SERVICE}/Unary",
        f"/{SERVICE}/unary",
        f"/{SERVICE}/Unary/",
        f"/{SERVICE}/Unary?grpc.health.v1.Health/Check",
        f"/{SERVICE}/Unary%2f",
        "/grpc.health.v1.Health/Nothing",
        "/grpc.health.v1.health/Check",
        "/grpc.health.v1.Health",
        "/no.such.Service/Method",
        "/",
    ],
)
@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_an_unauthenticated_caller_cant_find_out_what_exists(method: str, kind: str) -> None:
    async with echoing(_with_keys()) as served, served.channel() as channel:
        _is_unauthenticated(await refusal(raw_call(channel, kind, method, None)))
        known = await refusal(raw_call(channel, kind, method, None, _bearer(KEY)))
        assert known.code is grpc.StatusCode.UNIMPLEMENTED
        assert known.message == f"this server has no method {method[1:]}"
        assert served.echo.reached == 0


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("unary_unary", "Unary"), ("unary_stream", "Stream")],
)
async def test_an_unauthenticated_callers_bytes_are_not_parsed(kind: str, shape: str) -> None:
    malformed = (kind, f"/{SERVICE}/{shape}", b"\x0a\x01\xff")
    async with echoing(_with_keys()) as served, served.channel() as channel:
        _is_unauthenticated(await refusal(raw_call(channel, *malformed)))
        known = await refusal(raw_call(channel, *malformed, _bearer(KEY)))
    assert known.code is grpc.StatusCode.INTERNAL
    assert known.message == "value: is not valid UTF-8"


async def test_without_keys_and_peers_everybody_is_anonymous() -> None:
    async with echoing(AuthPolicy()) as served, served.channel() as channel:
        for shape in SHAPES:
            assert await answer(call(channel, shape)) == "hi anonymous anonymous"
        failed = await refusal(raw_call(channel, "unary_unary", "/no.such.Service/Method", None))
        assert failed.code is grpc.StatusCode.UNIMPLEMENTED


# ---- client certificates -------------------------------------------------------------------------

_SPIFFE = "spiffe://cluster.local/ns/millstream/sa/processor"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@contextlib.asynccontextmanager
async def _called_by(
    tmp_path: Path, authority: Authority, shown: Issued, policy: AuthPolicy
) -> AsyncIterator[Any]:
    server, client = SecretMount(tmp_path / "server"), SecretMount(tmp_path / "client")
    server.put(authority.issue("127.0.0.1"))
    client.put(shown)
    tls = ServerTls(TlsFiles(server.cert, server.key, server.ca))
    async with (
        echoing(policy, tls) as served,
        served.channel(ClientTls(client.root)) as channel,
    ):
        yield channel


@pytest.mark.parametrize(
    ("patterns", "allowed"),
    [
        ((_SPIFFE,), True),
        (("spiffe://cluster.local/ns/millstream/*",), True),
        (("spiffe://cluster.local/*",), True),
        (("nobody", _SPIFFE), True),
        (("*",), True),
        ((), False),
        (("spiffe://cluster.local/ns/mill/*",), False),
        (("spiffe://cluster.local/ns/millstream",), False),
        ((_SPIFFE + "/*",), False),
        ((_SPIFFE.upper(),), False),
        (("cluster.local",), False),
    ],
)
@pytest.mark.parametrize("shape", ["Unary", "Bidi"])
async def test_a_peer_is_known_by_its_uri(
    tmp_path: Path,
    authority: Authority,
    patterns: tuple[str, ...],
    allowed: bool,  # noqa: FBT001
    shape: str,
) -> None:
    policy = AuthPolicy(peers=PeerIdentities(patterns))
    async with _called_by(tmp_path, authority, authority.issue_uri(_SPIFFE), policy) as channel:
        if allowed:
            assert await answer(call(channel, shape)) == f"hi certificate {_SPIFFE}"
            return
        failed = await refusal(start(channel, shape))
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest())).status == 1
    assert failed == Failure(
        code=grpc.StatusCode.PERMISSION_DENIED,
        message="the client certificate is valid, but none of its DNS or URI names may call this "
        "server",
        reason="PERMISSION_DENIED",
    )


@pytest.mark.both_transports
@pytest.mark.parametrize(
    ("uris", "dns", "pattern", "allowed"),
    [
        ((), (_SPIFFE,), _SPIFFE, False),
        ((), (_SPIFFE,), "spiffe://cluster.local/*", False),
        (("urn:processor",), (), "urn:processor", True),
        (("processor.example",), ("other.example",), "processor.example", False),
        (("spiffe://td/other",), (_SPIFFE, "processor.example"), _SPIFFE, False),
        (("spiffe://td/other",), ("processor.example",), "processor.example", True),
        ((_SPIFFE,), ("processor.example",), _SPIFFE, True),
        ((), (_SPIFFE,), "*", True),
    ],
)
async def test_a_name_counts_as_what_its_entry_is(  # noqa: PLR0917 - a table
    tmp_path: Path,
    authority: Authority,
    uris: tuple[str, ...],
    dns: tuple[str, ...],
    pattern: str,
    allowed: bool,  # noqa: FBT001
) -> None:
    """A CA that lets a user choose DNS names may sign one that looks like a SPIFFE id."""
    policy = AuthPolicy(peers=PeerIdentities([pattern]))
    shown = authority.issue_uri(*uris, dns=dns)
    async with _called_by(tmp_path, authority, shown, policy) as channel:
        if allowed:
            assert (await answer(call(channel, "Unary"))).startswith("hi certificate ")
        else:
            failed = await refusal(call(channel, "Unary"))
            assert failed.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.both_transports
async def test_a_peer_is_known_by_its_dns_names_not_its_common_name(
    tmp_path: Path, authority: Authority
) -> None:
    shown = authority.issue("b.example", "A.example", common_name="c.example")
    for patterns, name in (
        (("a.EXAMPLE",), "a.example"),
        (("b.example",), "b.example"),
        (("c.example",), None),
        (("example",), None),
    ):
        policy = AuthPolicy(peers=PeerIdentities(patterns))
        root = tmp_path / patterns[0]
        async with _called_by(root, authority, shown, policy) as channel:
            if name:
                answered = await answer(call(channel, "Unary"))
                assert answered.lower() == f"hi certificate {name}"
            else:
                failed = await refusal(call(channel, "Unary"))
                assert failed.code is grpc.StatusCode.PERMISSION_DENIED
                assert failed.reason == "PERMISSION_DENIED"


async def test_with_keys_and_peers_both_are_needed(tmp_path: Path, authority: Authority) -> None:
    keys = ApiKeys(inline=f"alice:{KEY}")
    shown = authority.issue("processor.example")
    allows = AuthPolicy(keys=keys, peers=PeerIdentities(["processor.example"]))
    async with _called_by(tmp_path / "1", authority, shown, allows) as channel:
        assert await answer(call(channel, "Unary", metadata=_bearer(KEY))) == "hi api_key alice"
        _is_unauthenticated(await refusal(call(channel, "Unary")))
    forbids = AuthPolicy(keys=keys, peers=PeerIdentities(["other.example"]))
    async with _called_by(tmp_path / "2", authority, shown, forbids) as channel:
        failed = await refusal(call(channel, "Unary", metadata=_bearer(KEY)))
        assert failed.code is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.both_transports
async def test_where_peers_are_named_plaintext_callers_are_refused() -> None:
    policy = AuthPolicy(peers=PeerIdentities(["*"]))
    async with echoing(policy) as served, served.channel() as channel:
        failed = await refusal(call(channel, "Unary"))
        unknown = await refusal(raw_call(channel, "unary_unary", "/no.such.Service/Method", None))
    assert failed == unknown
    assert failed.code is grpc.StatusCode.UNAUTHENTICATED
    assert failed.reason == "UNAUTHENTICATED"
    assert failed.message == "this server requires a client certificate"


@pytest.mark.parametrize(
    "pattern",
    ["worker*", "*.example", "spiffe://*", "spiffe://td/ns/a*", "spiffe://td/*/sa/x", "**"],
)
def test_a_pattern_with_its_star_elsewhere_stops_the_start(pattern: str) -> None:
    with pytest.raises(SettingsError) as caught:
        PeerIdentities([pattern], "--admin-peers")
    assert str(caught.value).startswith(f"--admin-peers: {pattern!r}: ")
