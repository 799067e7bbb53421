"""What the Processor decides: which model, which prompt, is the request sound, who runs it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from millstream_server.engines.base import EngineInfo, GenerationRequest, Role
from millstream_server.engines.validation import check_request
from millstream_server.processor.generation import Generation, GenerationSpec
from millstream_server.processor.limits import (
    DEFAULT_LIMITS,
    RequestLimits,
    most_tokens,
    too_large,
)
from millstream_server.processor.pacing import Pacer
from millstream_server.processor.text.message_checks import check_messages
from millstream_server.processor.text.messages import ChatMessage, Tool
from millstream_server.processor.text.stops import check_stops
from millstream_server.processor.text.tokenizer import TextModel
from millstream_server.routing.pool import Route, WorkerPool
from millstream_server.runtime.admission import AdmissionQueue
from millstream_server.runtime.drain import OpenWork
from millstream_server.runtime.errors import (
    FieldViolation,
    InvalidRequestError,
    ModelNotFoundError,
    NoWorkerError,
    ServingError,
    UnavailableError,
)
from millstream_server.runtime.load_meter import LoadMeter
from millstream_server.runtime.orca import OUR_FAULT
from millstream_server.runtime.places import Ask, Place, Priority
from millstream_server.transfer.ticket import TicketKey
from millstream_server.worker_stream.start import MAX_REQUEST_ID_BYTES

logger = logging.getLogger(__name__)

MAX_CHOICES = 16
MAX_MIN_INTERVAL_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model with its text side and the engine limits its workers have now."""

    name: str
    text: TextModel
    engine: EngineInfo


class ProcessorCore:
    """Policy of the front door, in plain types; one per process."""

    def __init__(
        self,
        models: dict[str, TextModel],
        pool: WorkerPool,
        pacer: Pacer,
        ticket_key: TicketKey | None,
        text_threads: int,
        *,
        limits: RequestLimits = DEFAULT_LIMITS,
    ) -> None:
        """Serve ``models`` on the workers of ``pool``."""
        self._models = models
        self._pool = pool
        self._pacer = pacer
        self._ticket_key = ticket_key
        self.work = OpenWork()
        self._limits = limits
        self._queues = {
            name: AdmissionQueue(name, limits.queue, functools.partial(pool.capacity, name))
            for name in models
        }
        for queue in self._queues.values():
            pool.watch(queue.changed)
        self.meter = LoadMeter(self._utilization)
        self._executor = ThreadPoolExecutor(text_threads, thread_name_prefix="text")

    def text_model(self, name: str) -> tuple[str, TextModel]:
        """Look a model up; an empty name means the only one.

        Raises:
            ModelNotFoundError: it isn't served here.
            InvalidRequestError: no name was given and several models are served.
        """
        if not name:
            if len(self._models) == 1:
                return next(iter(self._models.items()))
            raise InvalidRequestError.of("model", f"name one of {sorted(self._models)}")
        if name not in self._models:
            raise ModelNotFoundError(
                f"model {name[:64]!r} is not served here; ListModels names those that are"
            )
        return name, self._models[name]

    def served(self, name: str) -> ServedModel:
        """Look up a model that can run requests now.

        Raises:
            NoWorkerError: none of its workers is connected.
        """
        name, text = self.text_model(name)
        engine = self._pool.engine(name)
        if engine is None:
            self.meter.finished(failed=True)
            raise NoWorkerError(
                "no worker for this model is connected; retry in a moment", retry_delay_s=1.0
            )
        return ServedModel(name, text, engine)

    def models(self) -> dict[str, tuple[TextModel, bool, EngineInfo | None, dict[Role, int]]]:
        """Describe every served model: text side, ready or not, engine, workers by role."""
        return {
            name: (
                text,
                self._pool.ready(name),
                self._pool.engine(name),
                self._pool.connected(name),
            )
            for name, text in sorted(self._models.items())
        }

    def ready(self) -> bool:
        """Tell whether every model has every worker it needs."""
        return all(self._pool.ready(name) for name in self._models)

    # ---- text, off the event loop ----------------------------------------------------------------

    async def render_chat(
        self,
        text: TextModel,
        messages: Sequence[ChatMessage],
        tools: Sequence[Tool],
    ) -> tuple[str, list[int]]:
        """Check a conversation, render the model's template, tokenize: prompt text and ids.

        Raises:
            InvalidRequestError: paths are relative to what holds `messages` and `tools`.
        """

        def work() -> tuple[str, list[int]]:
            violations = check_messages(messages, tools)
            if violations:
                raise invalid(violations)
            prompt = text.chat_template.render(messages, tools)
            return prompt, text.encode(prompt, add_special_tokens=False)

        return await self.off_loop(work)

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread: templates and tokenizers take milliseconds for long texts."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    # ---- generation ------------------------------------------------------------------------------

    def check(self, spec: GenerationSpec, engine: EngineInfo, prompt_field: str) -> None:
        """Refuse what can't succeed, naming every bad field; ``prompt_field`` is the prompt's.

        Raises:
            InvalidRequestError: paths are relative to the message that holds `options`.
        """
        violations = [
            FieldViolation(f"options.{v.field}", v.description) for v in check_stops(spec.stops)
        ]
        if not 1 <= spec.n <= MAX_CHOICES:
            violations.append(
                FieldViolation("options.n", f"must be from 1 to {MAX_CHOICES}, not {spec.n}")
            )
        if not 0 <= spec.min_interval_s <= MAX_MIN_INTERVAL_S:
            violations.append(FieldViolation("options.min_interval", "must be from 0 s to 10 s"))
        if len(spec.request_id.encode()) > MAX_REQUEST_ID_BYTES:
            violations.append(
                FieldViolation("request_id", f"must have at most {MAX_REQUEST_ID_BYTES} bytes")
            )
        if not spec.request_id.isprintable():  # it goes into log lines
            violations.append(FieldViolation("request_id", "must be printable"))
        if spec.priority is None:
            violations.append(FieldViolation("options.priority", "is not one that this server has"))
        violations = violations or too_large(spec, self._limits)
        if violations:
            raise invalid(violations)
        request = GenerationRequest(
            engine_id="",
            token_ids=spec.token_ids,
            sampling=spec.sampling,
            logprobs=spec.logprobs,
        )
        try:
            check_request(request, engine, Role.AGGREGATED)
        except InvalidRequestError as error:
            raise placed(error, lambda field: _client_field(field, prompt_field)) from error

    async def start(
        self,
        spec: GenerationSpec,
        text: TextModel,
        preferred: Route | None = None,
        on_wait: Callable[[Place], None] = lambda _: None,
    ) -> tuple[Generation, Route | None]:
        """Let a checked request in, route it and start it on its workers.

        Where there is room, that happens at once, without a turn of the event loop. Else it waits,
        and ``on_wait`` is called with its place; cancelled there, it ends as CANCELLED and never
        reaches a worker. A shutdown refuses nothing here: `call` and `conversation.Inbox` refuse
        what comes too late. When the last worker goes while requests wait, they wait on for
        `QueueLimits.comeback_s`, so that a reconnect or a restart costs nobody his turn; those that
        come meanwhile hear NO_WORKER at once, so that their clients can go elsewhere.

        Raises:
            UnavailableError: a worker it takes is away.
            OverloadedError: there is no room, not even to wait.
            DeadlinePassedError: the caller's time ran out while it waited.
        """
        with contextlib.ExitStack() as undo:
            with self._refusals():
                self._pool.require(spec.model)
                place = self._queues[spec.model].enter(_ask(spec))
                undo.callback(place.leave)
                if place.waits:
                    on_wait(place)
                    await place.ready()
                    spec = _after(place.waited_s, spec)
                # Cancelled while it waited, it goes nowhere.
                route = self._pool.route(spec.model, preferred) if place.runs else None
            generation = Generation(
                spec, text, self._pacer, functools.partial(self._over, place), place.leave
            )
            undo.callback(generation.close)
            if route:
                generation.start(route, self._ticket_key)
            else:
                generation.end_unstarted()
            undo.pop_all()
        return generation, route or preferred

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Count what is refused before there is a `Generation` to count."""
        try:
            yield
        except ServingError as error:
            self.meter.finished(failed=error.code in OUR_FAULT)
            raise

    def _over(self, place: Place, generation: Generation) -> None:
        """A turn is over, whatever the way: its place is free at the latest now."""
        place.leave()
        self.meter.finished(failed=generation.failed_with in OUR_FAULT)
        self._log(generation)

    def _utilization(self) -> float:
        return max((queue.utilization for queue in self._queues.values()), default=0.0)

    @contextlib.contextmanager
    def call(self, on_drain: Callable[[], None] | None = None) -> Iterator[None]:
        """Count a streaming RPC in; ``on_drain`` is called if the server begins to shut down.

        Raises:
            UnavailableError: this Processor is shutting down. What was let in before is answered.
        """
        if self.work.refusing:
            raise UnavailableError(
                "this server is shutting down; retry on another one", retry_delay_s=0.1
            )
        forget = self.work.when_leaving(on_drain) if on_drain else None
        with self.work.track():
            try:
                yield
            finally:
                if forget:
                    forget()

    @staticmethod
    def _log(generation: Generation) -> None:
        """Log a turn in one line; no text."""
        usage = generation.usage()
        logger.info(
            "request=%s trace_id=%s model=%s prompt_tokens=%d cached_tokens=%d "
            "completion_tokens=%d outcome=%s",
            generation.spec.request_id,
            generation.spec.telemetry.trace_id,
            generation.spec.model,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            generation.outcome,
        )

    def close(self) -> None:
        """Stop the text threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def invalid(violations: Sequence[FieldViolation]) -> InvalidRequestError:
    """Make one error of all violations."""
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    first = violations[0]
    return InvalidRequestError(
        f"{first.field}: {first.description}{more}", violations=tuple(violations)
    )


def _ask(spec: GenerationSpec) -> Ask:
    return Ask(
        units=spec.n,
        tokens=most_tokens(spec),
        priority=Priority.NORMAL if spec.priority is None else spec.priority,
        timeout_s=spec.timeout_s,
    )


def _after(waited_s: float, spec: GenerationSpec) -> GenerationSpec:
    """Take the time that a request waited off the time it has."""
    if spec.timeout_s is None:
        return spec
    return replace(spec, timeout_s=max(0.0, spec.timeout_s - waited_s))


def placed(error: InvalidRequestError, place: Callable[[str], str]) -> InvalidRequestError:
    """Make the same kind of error with the field paths that the client knows."""
    if not error.violations:
        return error
    moved = invalid([FieldViolation(place(v.field), v.description) for v in error.violations])
    return type(error)(moved.message, violations=moved.violations)


def _client_field(field: str, prompt_field: str) -> str:
    """Name what the client sent: engine checks speak of `token_ids`, `sampling.…`, `logprobs.…`."""
    if not field.startswith("token_ids"):
        return f"options.{field}"
    return prompt_field + (field.removeprefix("token_ids") if "token_ids" in prompt_field else "")
