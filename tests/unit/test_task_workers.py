"""A model's workers for images, videos, vectors and scores."""

from __future__ import annotations

from typing import Any

import pytest

from millstream_server.control.engine import Role, Task, WorkerDescription
from millstream_server.diffusion.diffuser import DiffuserInfo
from millstream_server.diffusion.request import Kind
from millstream_server.embedding.embedder import EmbedderInfo
from millstream_server.routing.kv_aware import make_policy
from millstream_server.routing.plan import RoutingRequest
from millstream_server.routing.policy import PolicyName
from millstream_server.routing.router import Router
from millstream_server.routing.workers import WorkerView
from millstream_server.runtime.errors import NoWorkerError
from tests.support.processor.views import load, view

REQUEST = RoutingRequest(model="m")


def _diffuser(address: str, kind: Kind = Kind.IMAGE, model: str = "m", **info: Any) -> WorkerView:
    values = {
        "engine": "played",
        "engine_version": "1",
        "max_running_requests": 2,
        "kinds": frozenset({kind}),
        "default_width": 8,
        "default_height": 8,
        "size_step": 8,
        "min_size": 8,
        "max_pixels": 64,
        "default_steps": 1,
        "max_steps": 9,
        "default_guidance_scale": 1.0,
        "max_outputs": 1,
        "max_prompt_tokens": 8,
        "schedulers": (),
    }
    engine = DiffuserInfo(**{**values, **info})
    what = WorkerDescription(role=Role.DIFFUSION, model=model, engine=engine)
    return WorkerView(address, what, what)


def _embedder(address: str, *, ranks: bool = False) -> WorkerView:
    engine = EmbedderInfo(
        engine="played",
        engine_version="1",
        max_running_requests=3,
        embeds=not ranks,
        ranks=ranks,
        width=4,
        dimensions=(),
        max_input_tokens=8,
        vocab_size=9,
        max_batch_tokens=8,
    )
    what = WorkerDescription(role=Role.EMBEDDING, model="m", engine=engine)
    return WorkerView(address, what, what)


def _router(*views: WorkerView) -> Router:
    router = Router(lambda: make_policy(PolicyName.LEAST_LOADED))
    for one in views:
        router.add(one)
    return router


def _lose(router: Router, lost: WorkerView) -> None:
    lost.description = None
    router.changed()


def _pick(router: Router, task: Task = Task.GENERATE_IMAGE, least_steps: int = 0) -> str:
    return router.task_workers("m").pick(
        REQUEST, task, lambda engine: getattr(engine, "max_steps", 0) >= least_steps
    )[0]


def test_they_make_a_model_ready_and_are_its_capacity() -> None:
    one, two = _diffuser("a:1"), _diffuser("b:1")
    router = _router(one, two, _diffuser("c:1", model="other"))
    assert router.ready("m")
    assert router.capacity("m") == 4
    assert router.connected("m") == {Role.DIFFUSION: 2}
    two.in_use = 1
    _lose(router, two)
    assert router.capacity("m") == 2 + 1, "and what still runs on the one that leaves"
    _lose(router, one)
    assert not router.ready("m")
    assert router.capacity("m") == 0


def test_they_generate_no_text_and_those_that_do_make_no_images() -> None:
    router = _router(_diffuser("a:1"))
    with pytest.raises(NoWorkerError):
        router.plan(REQUEST)
    assert router.of("m").limits is None
    router = _router(view("a:1"))
    assert router.capacity("m") == 4
    with pytest.raises(NoWorkerError):
        router.task_workers("m").engines(Task.GENERATE_IMAGE)


def test_the_least_loaded_that_is_able_is_picked() -> None:
    busy, idle, weak = _diffuser("a:1"), _diffuser("b:1"), _diffuser("c:1", max_steps=3)
    router = _router(busy, idle, weak)
    busy.in_flight = 2
    idle.load = load(1)
    assert _pick(router) == "c:1"
    assert _pick(router, least_steps=5) == "b:1"
    idle.load = load(1, queued=4)
    assert _pick(router, least_steps=5) == "a:1"
    assert router.task_workers("m").outstanding == 2 + 5
    with pytest.raises(NoWorkerError):
        _pick(router, least_steps=50)


def test_a_task_goes_to_the_workers_that_do_it() -> None:
    router = _router(
        _diffuser("a:1"),
        _diffuser("b:1", Kind.VIDEO),
        _embedder("c:1"),
        _embedder("d:1", ranks=True),
    )
    picked = {task: _pick(router, task) for task in router.tasks("m")}
    assert picked == {
        Task.GENERATE_IMAGE: "a:1",
        Task.GENERATE_VIDEO: "b:1",
        Task.EMBED: "c:1",
        Task.RERANK: "d:1",
    }


def test_what_a_model_does_is_known_while_its_workers_are_away() -> None:
    one = _diffuser("a:1")
    router = _router(one)
    _lose(router, one)
    assert router.tasks("m") == {Task.GENERATE_IMAGE}
    router.remove(one)
    assert not router.tasks("m")
