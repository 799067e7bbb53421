"""An `SglangEngine` in a process of its own, driven over JSON lines.

SGLang keeps its state in process globals, so prefill, decode and aggregated engines of one test
each need a process; and a test that kills an engine must survive it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.v1 import media_pb2, worker_pb2
from millstream_server.engines.base import EngineLoad, RankLoad, Role, WorkerDescription
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, Finish, FinishReason, TokenLogprob
from millstream_server.generation.request import GenerationRequest, LogprobOptions, Prompt
from millstream_server.generation.sampling import Ability, Constraint, ConstraintKind, Sampling
from millstream_server.kv_cache.events import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    KvEvent,
    Medium,
)
from millstream_server.media.items import MediaInput
from millstream_server.media.tensor import Tensor
from millstream_server.protobuf.media import item_from_proto, item_to_proto
from millstream_server.protobuf.worker import description_from_proto, description_to_proto
from millstream_server.runtime import errors
from millstream_server.runtime.telemetry.trace_context import TraceContext
from millstream_server.transfer.ticket import Ticket
from tests.support import forked
from tests.support.engine_controls import obey, packed, unpacked
from tests.support.kv_view import KvView

_LINE_LIMIT = 64 * 2**20
# One thread per engine is the fastest a model this small can be, and leaves the others a core.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_START_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 60.0


# ---- what travels -------------------------------------------------------------------------------


def _to_json(value: object) -> str:
    """Write dataclasses and enums as plain JSON."""

    def encode(item: object) -> object:
        if isinstance(item, (Role, FinishReason, Ability, ConstraintKind, Medium)):
            return item.value
        if isinstance(item, frozenset):
            return list(item)
        if isinstance(item, bytes):
            return item.hex()
        message = f"cannot send {item!r}"
        raise TypeError(message)

    return json.dumps(value, default=encode)


def _request(raw: Mapping[str, Any]) -> GenerationRequest:
    sampling = dict(raw["sampling"])
    sampling["stop_token_ids"] = tuple(sampling["stop_token_ids"])
    sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    if sampling["constraint"]:
        sampling["constraint"] = Constraint(
            ConstraintKind(sampling["constraint"]["kind"]), sampling["constraint"]["source"]
        )
    return GenerationRequest(
        engine_id=raw["engine_id"],
        prompt=Prompt(raw["prompt"]["token_ids"], tuple(map(_item, raw["prompt"]["media"]))),
        sampling=Sampling(**sampling),
        logprobs=LogprobOptions(**raw["logprobs"]) if raw["logprobs"] else None,
        **{name: raw[name] for name in ("adapter", "dp_rank", "cache_salt")},
        ticket=_ticket(raw["ticket"]) if raw["ticket"] else None,
        trace=TraceContext(**raw["trace"]),
    )


def _plain_item(item: MediaInput) -> dict[str, str]:
    return {
        "message": item_to_proto(item).SerializeToString().hex(),
        "bytes": base64.b64encode(item.tensor.data).decode() if item.tensor else "",
    }


def _item(raw: Mapping[str, str]) -> MediaInput:
    message = media_pb2.MediaItem.FromString(bytes.fromhex(raw["message"]))
    item = item_from_proto(message, "item")
    if item.ticket is None:
        return item
    data = memoryview(bytearray(base64.b64decode(raw["bytes"])))
    return dataclasses.replace(item, tensor=Tensor(item.ticket.tensor, data))


def _ticket(raw: Mapping[str, Any]) -> Ticket:
    return Ticket(**{**raw, "signature": bytes.fromhex(raw["signature"])})


def _finish(raw: Mapping[str, Any]) -> Finish:
    values = dict(raw)
    values["reason"] = FinishReason(values["reason"])
    values["prompt_logprobs"] = _token_logprobs(values["prompt_logprobs"])
    return Finish(**values)


def _token_logprobs(raw: Sequence[Mapping[str, Any]]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            entry["token_id"],
            entry["logprob"],
            tuple((token, logprob) for token, logprob in entry["top"]),
        )
        for entry in raw
    )


def _load(raw: Mapping[str, Any]) -> EngineLoad:
    return EngineLoad(**{**raw, "ranks": tuple(RankLoad(**each) for each in raw["ranks"])})


_KV_EVENTS = {kind.__name__: kind for kind in (BlocksStored, BlocksRemoved, CacheCleared)}


def _kv_event(raw: Mapping[str, Any]) -> KvEvent:
    values = dict(raw)
    kind = _KV_EVENTS[values.pop("kind")]
    if "medium" in values:
        values["medium"] = Medium(values["medium"])
    return kind(**values)


def _plain_info(info: GeneratorInfo) -> str:
    described = WorkerDescription(role=Role.AGGREGATED, model="", engine=info)
    return description_to_proto(described).SerializeToString().hex()


def _info(raw: str) -> GeneratorInfo:
    message = worker_pb2.WorkerInfo.FromString(bytes.fromhex(raw))
    engine = description_from_proto(message).engine
    assert isinstance(engine, GeneratorInfo)
    return engine


# ---- the engine's side --------------------------------------------------------------------------


class _Reporter:
    """Writes events to the parent."""

    def __init__(self) -> None:
        # Everything else that prints, SGLang's processes included, goes to stderr.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def event(self, name: str, **values: object) -> None:
        self._out.write(_to_json({"event": name, **values}) + "\n")
        self._out.flush()


class _ReportingSink:
    def __init__(self, reporter: _Reporter, engine_id: str) -> None:
        self._reporter = reporter
        self._id = engine_id

    def emit(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] = ()) -> None:
        plain = [dataclasses.asdict(entry) for entry in logprobs]
        self._reporter.event("emit", id=self._id, token_ids=list(token_ids), logprobs=plain)

    def finish(self, finish: Finish) -> None:
        self._reporter.event("finish", id=self._id, finish=dataclasses.asdict(finish))

    def fail(self, error: errors.ServingError) -> None:
        violations = [dataclasses.asdict(entry) for entry in error.violations]
        self._reporter.event(
            "fail",
            id=self._id,
            type=type(error).__name__,
            message=error.message,
            violations=violations,
        )


class _KvSink:
    def __init__(self, reporter: _Reporter) -> None:
        self._reporter = reporter

    def changed(self, dp_rank: int, events: Sequence[KvEvent]) -> None:
        plain = [{"kind": type(each).__name__, **dataclasses.asdict(each)} for each in events]
        self._reporter.event("kv", rank=dp_rank, events=plain)


async def _serve(
    config: SglangEngineConfig, reporter: _Reporter, close_after_s: float | None
) -> None:
    engine = SglangEngine(config)
    engine.follow_kv(_KvSink(reporter))
    if close_after_s is not None:
        closing = asyncio.create_task(_close_later(engine, close_after_s))
        closing.add_done_callback(lambda _: reporter.event("closed_early"))
    try:
        info = await engine.start(
            lambda error: reporter.event("engine_failed", type=type(error).__name__)
        )
        await engine.warm_up()
        reporter.event("ready", info=_plain_info(info))
        async for command in _commands():
            await _obey(engine, reporter, command)
    except errors.ServingError as error:
        reporter.event("not_started", type=type(error).__name__, message=error.message)
    finally:
        await engine.close()
        reporter.event("closed")


async def _close_later(engine: SglangEngine, delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    await engine.close()


async def _commands() -> AsyncIterator[dict[str, Any]]:
    reader = asyncio.StreamReader(limit=_LINE_LIMIT)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    with contextlib.closing(transport):
        while line := await reader.readline():
            yield json.loads(line)


async def _obey(engine: SglangEngine, reporter: _Reporter, command: Mapping[str, Any]) -> None:
    match command["op"]:
        case "submit":
            request = _request(command["request"])
            engine.submit(request, _ReportingSink(reporter, request.engine_id))
            if command["abort_at_once"]:
                engine.abort(request.engine_id)
        case "abort":
            engine.abort(command["id"])
        case "load":
            load = await engine.load()
            reporter.event("answer", call=command["call"], value=dataclasses.asdict(load))
        case "flush":
            assert engine._built is not None
            done = await engine._built.engine.tokenizer_manager.flush_cache()
            reporter.event("answer", call=command["call"], value=bool(done.success))
        case "control":
            task = asyncio.create_task(_control(engine, reporter, command))
            _controls.add(task)
            task.add_done_callback(_controls.discard)
        case "inspect":
            reporter.event("answer", call=command["call"], value=await _inspect(engine))


_controls: set[asyncio.Task[None]] = set()


async def _control(engine: SglangEngine, reporter: _Reporter, command: Mapping[str, Any]) -> None:
    call = command["call"]
    try:
        value = await obey(engine.controls, *unpacked(command["operation"]))
    except errors.ServingError as error:
        reporter.event("refused", call=call, type=type(error).__name__, message=error.message)
    except Exception as error:
        reporter.event("refused", call=call, type="InternalError", message=repr(error))
        raise
    else:
        reporter.event("answer", call=call, value=packed(value))


async def _inspect(engine: SglangEngine) -> dict[str, object]:
    """Look behind the adapter: SGLang's own view, and its processes."""
    assert engine._built is not None
    vendor = engine._built.engine
    manager = vendor.tokenizer_manager
    (load,) = await manager.get_loads()
    return {
        "running": load.num_running_reqs,
        "waiting": load.num_waiting_reqs,
        "used_tokens": load.num_used_tokens,
        "disaggregation": load.to_dict()["disaggregation"],
        "open_requests": len(manager.rid_to_state),
        "pids": vendor.get_all_child_pids(),
        "sigterm_is_ours": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


def _main() -> None:
    raw = json.loads(sys.argv[1])
    config = SglangEngineConfig(**{**raw, "role": Role(raw["role"])})
    close_after_s = float(sys.argv[2]) if sys.argv[2] else None
    asyncio.run(_serve(config, _Reporter(), close_after_s))


# ---- the test's side ----------------------------------------------------------------------------


class _Sink(CollectingSink):
    """Knows whether its end has come."""

    ended = False

    def finish(self, finish: Finish) -> None:
        self.ended = True
        super().finish(finish)

    def fail(self, error: errors.ServingError) -> None:
        self.ended = True
        super().fail(error)


class EngineProcess:
    """The test's handle of an engine in another process."""

    def __init__(self, process: forked.Process, log: Path) -> None:
        """Take over a started process; `launch` connects its streams."""
        self.engine_failed = asyncio.Event()
        self.failures = 0
        self.kv = KvView()
        self.log = log
        self._process = process
        self._sinks: dict[str, _Sink] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._calls = itertools.count()
        self._ready: asyncio.Future[GeneratorInfo] = asyncio.get_running_loop().create_future()
        self._stdin: asyncio.WriteTransport | None = None
        self._reader: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process that holds the engine, SGLang's parent."""
        return self._process.pid

    @classmethod
    async def launch(
        cls,
        log: Path,
        *,
        close_after_s: float | None = None,
        env: Mapping[str, str] | None = None,
        **config: object,
    ) -> EngineProcess:
        """Start the process; `ready` tells when the engine is up.

        With ``close_after_s`` the engine is closed that long after its start began.
        """
        config.setdefault("role", Role.AGGREGATED)
        stdin, to_engine = os.pipe()
        from_engine, stdout = os.pipe()
        with log.open("wb") as log_file:
            process = await asyncio.to_thread(
                forked.start,
                "sglang",
                "tests.support.engine_process",
                [_to_json(config), str(close_after_s or "")],
                (stdin, stdout, log_file),
                {**os.environ, **_ENVIRONMENT, **(env or {})},
            )
        os.close(stdin)
        os.close(stdout)
        engine = cls(process, log)
        await engine._connect(to_engine, from_engine)
        return engine

    async def _connect(self, to_engine: int, from_engine: int) -> None:
        loop = asyncio.get_running_loop()
        self._stdin, _ = await loop.connect_write_pipe(
            asyncio.BaseProtocol, os.fdopen(to_engine, "wb", buffering=0)
        )
        reader = asyncio.StreamReader(limit=_LINE_LIMIT)
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_engine, "rb", buffering=0)
        )
        self._reader = asyncio.create_task(self._read(reader))

    async def ready(self) -> GeneratorInfo:
        """Wait until the engine is started and warm."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            return await asyncio.shield(self._ready)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._take(json.loads(line))
        ended = RuntimeError(f"the engine's process ended; its log: {self.log.read_text()[-3000:]}")
        if not self._ready.done():
            self._ready.set_exception(ended)
        for answer in self._answers.values():
            answer.set_exception(ended)
        for sink in self._sinks.values():
            if not sink.ended:
                sink.fail(errors.EngineFailedError(str(ended)))

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "ready":
                self._ready.set_result(_info(event["info"]))
            case "not_started":
                self._ready.set_exception(getattr(errors, event["type"])(event["message"]))
            case "emit":
                logprobs = _token_logprobs(event["logprobs"])
                self._sinks[event["id"]].emit(event["token_ids"], logprobs)
            case "finish":
                self._sinks[event["id"]].finish(_finish(event["finish"]))
            case "fail":
                violations = tuple(errors.FieldViolation(**raw) for raw in event["violations"])
                error = getattr(errors, event["type"])(event["message"], violations=violations)
                self._sinks[event["id"]].fail(error)
            case "refused":
                refusal = getattr(errors, event["type"])(event["message"])
                self._answers.pop(event["call"]).set_exception(refusal)
            case "answer":
                self._answers.pop(event["call"]).set_result(event["value"])
            case "kv":
                self.kv.changed(event["rank"], [_kv_event(each) for each in event["events"]])
            case "engine_failed":
                self.failures += 1
                self.engine_failed.set()

    def _send(self, **command: object) -> None:
        assert self._stdin is not None
        if self._reader is None or self._reader.done():
            raise RuntimeError("the engine's process ended")
        self._stdin.write((_to_json(command) + "\n").encode())

    def submit(self, request: GenerationRequest, *, abort_at_once: bool = False) -> CollectingSink:
        """Start a request; with ``abort_at_once`` it is aborted in the same loop iteration."""
        sink = self._sinks[request.engine_id] = _Sink()
        media = [_plain_item(item) for item in request.prompt.media]
        plain = dataclasses.asdict(
            dataclasses.replace(request, prompt=Prompt(request.prompt.token_ids))
        )
        plain["prompt"]["media"] = media
        self._send(op="submit", request=plain, abort_at_once=abort_at_once)
        return sink

    def abort(self, engine_id: str) -> None:
        """Abort a request."""
        self._send(op="abort", id=engine_id)

    def abort_all(self) -> None:
        """Abort all requests that haven't ended."""
        for engine_id, sink in self._sinks.items():
            if not sink.ended:
                self.abort(engine_id)

    async def load(self) -> EngineLoad:
        """Ask the adapter."""
        return _load(await self._call("load"))

    async def flush(self) -> bool:
        """Empty SGLang's prefix cache; answers whether it did."""
        return bool(await self._call("flush"))

    async def inspect(self) -> dict[str, Any]:
        """Ask SGLang behind the adapter's back."""
        answer: dict[str, Any] = await self._call("inspect")
        return answer

    async def control(self, ability: str, method: str, *arguments: object) -> Any:
        """Run one of the engine's operations: an attribute of its `controls`, and a method."""
        operation = packed((ability, method, arguments))
        return unpacked(await self._call("control", operation=operation))

    async def _call(self, op: str, **values: object) -> Any:
        number = next(self._calls)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(op=op, call=number, **values)
        async with asyncio.timeout(30):
            return await answer

    async def close(self) -> int:
        """End the engine and its process; answers the exit status."""
        assert self._stdin is not None
        assert self._reader is not None
        self._stdin.close()
        try:
            status = await asyncio.to_thread(self._process.wait, _CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            await asyncio.to_thread(self._process.wait)
            raise
        await self._reader
        return status


if __name__ == "__main__":
    _main()
