"""A suite of real processes with TLS, API keys and client certificates: who gets in, and where."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from millstream.v1 import admin_pb2, admin_pb2_grpc, worker_pb2, worker_pb2_grpc
from millstream_client import NO_RETRY, Client, PermissionDeniedError, Tls, UnauthenticatedError
from millstream_client.errors import MillstreamError
from millstream_testing.waiting import until
from tests.support.processes.ports import free_port
from tests.support.processes.processes import complaints
from tests.support.processes.simulated_suite import ALPHABET, SimulatedSuite
from tests.support.processes.suite import ServiceProcess
from tests.support.wire.certificates import Authority, Issued, SecretMount
from tests.support.wire.failures import Failure, refusal
from tests.support.wire.long_streams import server_status

pytestmark = pytest.mark.timeout(120)

HOST = "127.0.0.1"
PROCESSOR_ID = "spiffe://millstream.example/processor"
OPERATOR = "operator.example"
UNKNOWN_PEER = "unknown.example"
ALICE, BOB = "a" * 32, "b" * 32
LONG = {"max_new_tokens": len(ALPHABET), "ignore_eos": True}
INFO = worker_pb2.GetWorkerInfoRequest()


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def channel_to(address: str, shown: Issued | None = None, ca: bytes | None = None) -> Any:
    """Open a channel that shows a certificate; with neither, in plaintext."""
    if shown is None and ca is None:
        return grpc.aio.insecure_channel(address)
    key, cert = (shown.key, shown.cert) if shown else (None, None)
    roots = ca or (shown.ca if shown else None)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(roots, key, cert))


@dataclass
class Secured:
    """A Processor with TLS and keys in front, workers that know nobody but it, all on files."""

    folder: Path
    authority: Authority
    made: SimulatedSuite = field(init=False)
    front: ServiceProcess = field(init=False)
    admin_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        """Write certificates and keys."""
        self.made = SimulatedSuite(self.folder)
        self.worker_files = SecretMount(self.folder / "worker")
        self.processor_files = SecretMount(self.folder / "processor")
        self.front_files = SecretMount(self.folder / "front")
        self.keys = self.folder / "keys"
        self.issue(self.authority)
        self.front_files.put(self.authority.issue(HOST))
        self.write_keys(f"alice:{ALICE}", f"bob:{BOB}")

    def issue(self, authority: Authority) -> None:
        """Give workers and Processor certificates of ``authority``, and trust in it."""
        self.worker_files.put(authority.issue(HOST))
        self.processor_files.put(authority.issue_uri(PROCESSOR_ID))

    def write_keys(self, *entries: str) -> None:
        fresh = self.folder / "keys.new"
        fresh.touch(0o600)
        fresh.write_text("\n".join(entries))
        fresh.rename(self.keys)

    @property
    def worker_flags(self) -> dict[str, Any]:
        return {
            "tls_cert_file": self.worker_files.cert,
            "tls_key_file": self.worker_files.key,
            "tls_client_ca_file": self.worker_files.ca,
            "allowed_peers": "spiffe://millstream.example/*",
            "propagation_s": 0,
        }

    def add_worker(self, **flags: Any) -> ServiceProcess:
        return self.made.add_worker("worker", **self.worker_flags, **flags)

    def add_processor(self) -> None:
        self.front = self.made.add_processor(
            "processor",
            tls_cert_file=self.front_files.cert,
            tls_key_file=self.front_files.key,
            api_keys_file=self.keys,
            worker_tls_dir=self.processor_files.root,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            for service in self.made.services.values():
                service.start()
            await self.until_ready()
            yield
        finally:
            for service in self.made.services.values():
                service.kill()
        for service in self.made.services.values():
            assert complaints(service.log.read_text()) == []

    async def until_ready(self) -> None:
        async with self.client() as client:
            await until(client.health, 30)

    def client(self, key: str | None = ALICE, *, tls: bool = True) -> Client:
        trusted = Tls(ca_file=self.front_files.ca) if tls else None
        return Client(self.front.address, api_key=key, tls=trusted, retry=NO_RETRY)


@contextlib.asynccontextmanager
async def secured(
    folder: Path, authority: Authority, **worker: Any
) -> AsyncIterator[tuple[Secured, ServiceProcess]]:
    suite = Secured(folder, authority)
    one = suite.add_worker(**worker)
    suite.add_processor()
    async with suite.running():
        yield suite, one


async def _failed(client: Client) -> MillstreamError:
    async with client:
        with pytest.raises(MillstreamError) as caught:
            await client.chat("hi", max_new_tokens=3).answer()
    return caught.value


# ---- clients of the Processor --------------------------------------------------------------------


async def test_who_may_chat(tmp_path: Path, authority: Authority) -> None:
    async with secured(tmp_path, authority) as (suite, _):
        async with suite.client() as client:
            assert (await client.chat("hi", max_new_tokens=3).answer()).text == "ABC"
            assert [model.ready for model in await client.models()] == [True]

        for key in (None, "c" * 32):
            error = await _failed(suite.client(key))
            assert isinstance(error, UnauthenticatedError)
            assert error.reason == "UNAUTHENTICATED"
            assert not error.retryable
            assert "API key" in error.message

        async with suite.client(None) as client:
            assert await client.health(), "probes bring no key"
        error = await _failed(suite.client(ALICE, tls=False))
        assert error.code is grpc.StatusCode.UNAVAILABLE
        untrusting = channel_to(suite.front.address, ca=Authority().pem)
        async with untrusting as channel:
            check = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert (await refusal(check)).code is grpc.StatusCode.UNAVAILABLE


async def test_a_key_that_was_taken_out_is_refused_from_the_next_rpc_on(
    tmp_path: Path, authority: Authority
) -> None:
    async with (
        secured(tmp_path, authority, simulated_step_s=0.02) as (suite, _),
        suite.client(ALICE) as alice,
        suite.client(BOB) as bob,
    ):
        running = alice.chat("hi", **LONG)  # type: ignore[arg-type]
        await anext(running)
        suite.write_keys(f"bob:{BOB}")
        with pytest.raises(UnauthenticatedError) as refused:
            await alice.chat("hi", max_new_tokens=1).answer()
        assert refused.value.reason == "UNAUTHENTICATED"
        assert (await bob.chat("hi", max_new_tokens=1).answer()).text == "A"
        assert (await running.answer()).text == ALPHABET, "a stream that is open goes on"

        suite.write_keys(f"bob:{BOB}", f"alice:{ALICE}")
        assert (await alice.chat("hi", max_new_tokens=1).answer()).text == "A"


async def test_prefill_and_decode_apart(tmp_path: Path, authority: Authority) -> None:
    suite = Secured(tmp_path, authority)
    for name, more in (
        ("prefill", {"bootstrap_port": free_port()}),
        ("decode", {"mode": "disaggregated"}),
    ):
        suite.made.add_worker(name, name, **suite.worker_flags, **more)
    suite.add_processor()
    async with suite.running(), suite.client() as client:
        assert (await client.chat("hi", max_new_tokens=3).answer()).text == "ABC"


async def test_who_may_make_images_and_vectors(tmp_path: Path, authority: Authority) -> None:
    suite = Secured(tmp_path, authority)
    add = {"drawing": suite.made.add_diffusion_worker, "vectors": suite.made.add_embedding_worker}
    for name, add_worker in add.items():
        worker = add_worker(name, model_name=name, **suite.worker_flags)
        suite.made.models[name] = [worker.address]
    suite.add_processor()
    async with suite.running():
        async with suite.client() as client:
            media, vectors, ranked = [await call for call in _generations(client)]
            assert media.files[0].media_type == "image/png"
            assert (len(vectors), len(ranked)) == (1, 1)
        for key in (None, "c" * 32):
            async with suite.client(key) as client:
                for call in _generations(client):
                    with pytest.raises(UnauthenticatedError, match="API key"):
                        await call
        for name in add:
            address = suite.made.services[name].address
            denied = await _info(address, authority.issue(UNKNOWN_PEER))
            assert denied.reason == "PERMISSION_DENIED"


def _generations(client: Client) -> Iterator[Any]:
    yield client.generate_image("a cat", model="drawing").result()
    yield client.embed("a cat", model="vectors")
    yield client.rerank("a cat", ["a dog"], model="vectors")


# ---- peers of a worker ---------------------------------------------------------------------------


async def _info(address: str, shown: Issued | None = None, ca: bytes | None = None) -> Failure:
    async with channel_to(address, shown, ca) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        return await refusal(stub.GetWorkerInfo(INFO))


async def test_a_worker_talks_to_its_processor_only(tmp_path: Path, authority: Authority) -> None:
    async with secured(tmp_path, authority) as (_, worker):
        async with channel_to(worker.address, authority.issue_uri(PROCESSOR_ID)) as channel:
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            assert (await stub.GetWorkerInfo(INFO)).info.model

        denied = await _info(worker.address, authority.issue(UNKNOWN_PEER))
        assert denied.code is grpc.StatusCode.PERMISSION_DENIED
        assert denied.reason == "PERMISSION_DENIED"
        assert not denied.retryable
        named_like_one = authority.issue(UNKNOWN_PEER, common_name=PROCESSOR_ID)
        assert (await _info(worker.address, named_like_one)).reason == "PERMISSION_DENIED"

        # These don't even get a connection, so no details either.
        foreign = Authority().issue_uri(PROCESSOR_ID)
        for shown, ca in ((None, None), (None, authority.pem), (foreign, authority.pem)):
            refused = await _info(worker.address, shown, ca)
            assert refused.code is grpc.StatusCode.UNAVAILABLE
            assert refused.reason == ""


async def test_a_worker_of_a_changed_ca_is_found_again_without_a_restart_of_the_processor(
    tmp_path: Path, authority: Authority
) -> None:
    async with secured(tmp_path, authority, simulated_step_s=0.02) as (suite, worker):
        async with suite.client() as client:
            chats = [client.chat("hi", **LONG) for _ in range(4)]  # type: ignore[arg-type]
            for chat in chats:
                await anext(chat)
            changed = Authority()
            suite.issue(changed)
            worker.terminate()
            for chat in chats:
                assert (await chat.answer()).text == ALPHABET, "open connections live on"
            assert await worker.until_gone(10) == 0
            worker.start()

            await _away_and_back(client)
            assert (await client.chat("hi", max_new_tokens=3).answer()).text == "ABC"
        old = authority.issue_uri(PROCESSOR_ID)
        assert (await _info(worker.address, old)).code is grpc.StatusCode.UNAVAILABLE
        assert suite.front.alive


async def _away_and_back(client: Client) -> None:
    """Wait until the Processor has seen its worker go, and come."""
    await until(lambda: _unready(client))
    await until(client.health, 20)


async def _unready(client: Client) -> bool:
    return not await client.health()


async def test_new_certificates_of_the_same_ca_cost_nothing(
    tmp_path: Path, authority: Authority
) -> None:
    """Not even with the worker's connection made anew meanwhile."""
    async with secured(tmp_path, authority) as (suite, worker), suite.client() as client:
        suite.issue(authority)
        worker.terminate()
        assert await worker.until_gone(10) == 0
        worker.start()
        await _away_and_back(client)
        assert (await client.chat("hi", max_new_tokens=3).answer()).text == "ABC"


# ---- operators -----------------------------------------------------------------------------------


async def _status_refused(address: str, shown: Issued | None, ca: bytes | None) -> Failure:
    async with channel_to(address, shown, ca) as channel:
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        return await refusal(stub.GetServerStatus(admin_pb2.GetServerStatusRequest()))


async def test_the_admin_address_is_for_operators_only(
    tmp_path: Path, authority: Authority
) -> None:
    address = f"{HOST}:{free_port()}"
    flags = {"admin_listen": address, "admin_peers": OPERATOR}
    async with secured(tmp_path, authority, **flags) as (_, worker):
        async with channel_to(address, authority.issue(OPERATOR)) as channel:
            status = await server_status(channel)
            assert status.pid == worker.pid
            assert status.health["millstream.v1.DecodeService"] is True

        processor = await _status_refused(address, authority.issue_uri(PROCESSOR_ID), None)
        assert processor.code is grpc.StatusCode.PERMISSION_DENIED
        assert processor.reason == "PERMISSION_DENIED"
        foreign = Authority().issue(OPERATOR)
        for shown, ca in ((None, None), (None, authority.pem), (foreign, authority.pem)):
            refused = await _status_refused(address, shown, ca)
            assert refused.code is grpc.StatusCode.UNAVAILABLE

        # And the operator's certificate is none for the service itself.
        assert (await _info(worker.address, authority.issue(OPERATOR))).reason == (
            PermissionDeniedError.code.name
        )


async def test_with_tls_nobody_is_an_operator_unless_named(
    tmp_path: Path, authority: Authority
) -> None:
    address = f"{HOST}:{free_port()}"
    flags = {"admin_listen": address, "admin_peers": "somebody.else"}
    async with secured(tmp_path, authority, **flags):
        refused = await _status_refused(address, authority.issue(OPERATOR), None)
        assert refused.code is grpc.StatusCode.PERMISSION_DENIED
