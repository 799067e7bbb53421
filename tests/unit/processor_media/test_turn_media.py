"""A turn's files on the encode workers: in parallel, elsewhere after a loss, given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from millstream_server.control.engine import Role, Task, WorkerDescription
from millstream_server.encode.encoder import EncoderInfo
from millstream_server.generation.generator import MediaModel
from millstream_server.media.items import Content, EncodedItem, Geometry, MediaFile, Modality
from millstream_server.media.tensor import ElementType, TensorSpec
from millstream_server.processor.conversation import Caller
from millstream_server.processor.media.core import ProcessorMedia, TurnMedia
from millstream_server.processor.media.intake import Intake
from millstream_server.processor.media.uploads import MediaBudget
from millstream_server.processor.media.urls import UrlFetcher
from millstream_server.processor.telemetry import FrontTelemetry, TurnTelemetry
from millstream_server.processor.text.messages import MediaPart
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import (
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    RequestCancelledError,
    ServingError,
    WorkerLostError,
)
from millstream_server.runtime.work.fair_queue import PoolLimits
from millstream_server.runtime.work.pool import WorkPool
from millstream_testing.waiting import until
from tests.support.processor.views import description

MEDIA = MediaModel(modalities=frozenset({Modality.IMAGE}), family="qwen3_vl", embedding_width=8)
ENCODER = EncoderInfo(
    engine="simulated",
    engine_version="1",
    max_running_requests=4,
    modalities=frozenset({Modality.IMAGE}),
)


def encode_view(address: str) -> WorkerView:
    what = WorkerDescription(role=Role.ENCODE, model="m", engine=ENCODER)
    return WorkerView(address, what, what)


def aggregated_view(address: str, *, encodes: bool = False) -> WorkerView:
    what = replace(description(media=MEDIA), encoder=ENCODER if encodes else None)
    return WorkerView(address, what, what)


def router_of(*views: WorkerView) -> Router:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    for view in views:
        router.add(view)
    return router


def part(data: bytes) -> MediaPart:
    return MediaPart(Modality.IMAGE, f"field of {data.decode()}", data, sha256=data.ljust(32))


class Item:
    """One item on a scripted worker."""

    def __init__(self, address: str, file: MediaFile) -> None:
        self.address = address
        self.file = file
        self.outcome: asyncio.Future[EncodedItem] = asyncio.get_running_loop().create_future()
        self.cancelled = False

    async def result(self) -> EncodedItem:
        try:
            return await asyncio.shield(self.outcome)
        except asyncio.CancelledError:
            self.cancel()
            raise

    def cancel(self) -> None:
        self.cancelled = True

    def finish(self) -> None:
        item = EncodedItem(
            modality=Modality.IMAGE,
            digest=self.file.sha256,
            tokens=1,
            geometry=Geometry(),
            tensor=TensorSpec(ElementType.FLOAT32, (1, 8)),
            content=Content.ROWS,
            lease=f"lease of {bytes(self.file.data).decode()}",
        )
        self.outcome.set_result(item)


class Workers:
    """Encode workers whose items end as the test says."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.released: list[tuple[str, str]] = []

    def encode(self, address: str, file: MediaFile) -> Item:
        item = Item(address, file)
        self.items.append(item)
        return item

    def release(self, address: str, lease: str) -> None:
        self.released.append((address, lease))


def _telemetry() -> TurnTelemetry:
    return TurnTelemetry(FrontTelemetry(), Task.CHAT)


def media_of(router: Router, workers: Any, name: str = "", *, shared: bool = False) -> TurnMedia:
    urls = UrlFetcher(enabled=False, hosts=(), max_bytes=1, pool=WorkPool(PoolLimits()))
    intake = Intake(urls, max_item_bytes=1, max_items=1)
    media = ProcessorMedia(router, workers, intake, MediaBudget(0), shared_cache=shared)
    return TurnMedia(media, RoutingRequest(model="m"), "r", Caller(name=name), _telemetry())


async def prepared() -> None:
    """Stand for the intake: nothing to do."""


def started(media: TurnMedia, parts: Iterable[MediaPart]) -> asyncio.Future[None]:
    return asyncio.ensure_future(media.encode(list(parts), prepared))


async def test_the_same_file_goes_to_the_same_worker_and_others_are_spread() -> None:
    router = router_of(*(encode_view(f"e{n}") for n in range(4)), aggregated_view("a"))
    request = RoutingRequest(model="m")
    at = [router.of("m").encoder(request, bytes([n]) * 32).worker.address for n in range(64)]
    assert at == [
        router.of("m").encoder(request, bytes([n]) * 32).worker.address for n in range(64)
    ]
    assert set(at) == {"e0", "e1", "e2", "e3"}


async def test_a_file_goes_elsewhere_when_its_worker_is_clearly_busier() -> None:
    views = [encode_view(f"e{n}") for n in range(2)]
    router = router_of(*views, aggregated_view("a"))
    request = RoutingRequest(model="m")
    first = router.of("m").encoder(request, b"1" * 32).worker
    first.in_flight = 8
    assert router.of("m").encoder(request, b"1" * 32).worker is first
    first.in_flight = 9
    assert router.of("m").encoder(request, b"1" * 32).worker is not first


async def test_all_files_are_encoded_at_the_same_time_and_kept_until_released() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1"), part(b"2")])
    await until(lambda: len(workers.items) == 2)
    for item in reversed(workers.items):
        item.finish()
    await done
    assert [bytes(found.part.data) for found in media.encoded] == [b"1", b"2"]
    assert not workers.released
    assert media.held_at == ""
    media.release()
    media.release()
    assert sorted(workers.released) == [("e", "lease of 1"), ("e", "lease of 2")]


async def test_a_file_whose_worker_is_lost_is_encoded_on_another() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e0"), encode_view("e1"), aggregated_view("a")), workers)
    done = started(media, [part(b"1")])
    await until(lambda: len(workers.items) == 1)
    workers.items[0].outcome.set_exception(WorkerLostError("gone"))
    await until(lambda: len(workers.items) == 2)
    assert workers.items[1].address != workers.items[0].address
    workers.items[1].finish()
    await done
    assert media.encoded[0].address == workers.items[1].address


async def test_without_another_worker_the_turn_fails_once() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1")])
    await until(lambda: len(workers.items) == 1)
    workers.items[0].outcome.set_exception(WorkerLostError("gone"))
    with pytest.raises(NoWorkerError, match="no encode worker for this model is connected"):
        await done


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (
            InvalidRequestError.of("data", "is truncated"),
            "field of 1: is truncated",
        ),
        (OverloadedError("busy"), "busy"),
    ],
    ids=["refused", "overloaded"],
)
async def test_one_failed_file_stops_the_others_and_gives_back_what_was_made(
    error: ServingError, raised: str
) -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1"), part(b"2"), part(b"3")])
    await until(lambda: len(workers.items) == 3)
    bad, made, running = (
        next(item for item in workers.items if item.file.data == data)
        for data in (b"1", b"2", b"3")
    )
    made.finish()
    await until(lambda: bool(media._held))
    bad.outcome.set_exception(error)
    with pytest.raises(type(error)) as failed:
        await done
    assert failed.value.message == raised
    assert running.cancelled
    media.release()
    assert workers.released == [("e", "lease of 2")]


@pytest.mark.parametrize("early", [True, False], ids=["before it started", "while it runs"])
async def test_cancelled_media_end_with_nothing_encoded(early: bool) -> None:  # noqa: FBT001
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    if early:
        media.cancel()
    done = started(media, [part(b"1"), part(b"2")])
    if not early:
        await until(lambda: len(workers.items) == 2)
        workers.items[0].finish()
        await until(lambda: bool(media._held))
        media.cancel()
    await done
    assert media.cancelled
    assert not media.encoded
    assert [lease for _, lease in workers.released] == ([] if early else ["lease of 1"])
    assert all(item.cancelled for item in workers.items[1:])


async def test_the_clients_error_ends_the_encoding() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1")])
    await until(lambda: len(workers.items) == 1)
    media.fail(InvalidRequestError("broken rules"))
    with pytest.raises(InvalidRequestError, match="broken rules"):
        await done
    assert workers.items[0].cancelled


async def test_an_rpc_that_is_cancelled_stops_its_items() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1")])
    await until(lambda: len(workers.items) == 1)
    done.cancel()
    with pytest.raises(asyncio.CancelledError):
        await done
    await until(lambda: workers.items[0].cancelled)


async def test_a_result_that_comes_too_late_is_given_back() -> None:
    workers = Workers()
    media = media_of(router_of(encode_view("e"), aggregated_view("a")), workers)
    done = started(media, [part(b"1")])
    await until(lambda: len(workers.items) == 1)
    media.release()
    workers.items[0].finish()
    with pytest.raises(RequestCancelledError):
        await done
    assert workers.released == [("e", "lease of 1")]


async def test_pixels_stay_with_the_worker_that_runs_the_request() -> None:
    workers = Workers()
    views = [aggregated_view(f"a{n}", encodes=True) for n in range(3)]
    router = router_of(*views)
    media = media_of(router, workers)
    done = started(media, [part(bytes([97 + n])) for n in range(6)])
    await until(lambda: len(workers.items) == 6)
    for item in workers.items:
        item.finish()
    await done
    assert {found.address for found in media.encoded} == {media.held_at}
    plan = router.plan(RoutingRequest(model="m", media_at=media.held_at))
    assert plan.places == (media.held_at,)
    router.remove(next(view for view in views if view.address == media.held_at))
    with pytest.raises(WorkerLostError, match="that holds this request's media went away"):
        router.plan(RoutingRequest(model="m", media_at=media.held_at))


@pytest.mark.parametrize(
    ("views", "modalities"),
    [
        (lambda: [aggregated_view("a"), encode_view("e")], {Modality.IMAGE}),
        (lambda: [aggregated_view("a", encodes=True)], {Modality.IMAGE}),
        (lambda: [aggregated_view("a")], set()),
        (lambda: [encode_view("e")], set()),
    ],
    ids=["an encode worker", "a worker with a tower", "no encoder", "no generator"],
)
def test_what_a_model_takes_depends_on_its_workers(
    views: Callable[[], list[WorkerView]], modalities: set[Modality]
) -> None:
    assert router_of(*views()).of("m").modalities == modalities


@pytest.mark.parametrize(("shared", "salts"), [(False, ["a", "b"]), (True, ["", ""])])
async def test_callers_share_cached_results_only_if_they_may(
    shared: bool,  # noqa: FBT001 - a case of the test
    salts: list[str],
) -> None:
    workers = Workers()
    router = router_of(encode_view("e"), aggregated_view("a"))
    for name in ("a", "b"):
        turn = media_of(router, workers, name, shared=shared)
        done = started(turn, [part(b"1")])
        await until(lambda: not workers.items[-1].outcome.done() if workers.items else False)
        workers.items[-1].finish()
        await done
    assert [item.file.salt for item in workers.items] == salts
