"""The process of a test's `SglangEngine`, which obeys lines of JSON (`engines.engine_process`)."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from millstream_server.control.engine import Role
from millstream_server.engines.sglang.engine import SglangEngine, SglangEngineConfig
from millstream_server.generation.output import Finish, TokenLogprob
from millstream_server.kv_cache.events import (
    KvEvent,
)
from millstream_server.runtime import errors
from tests.support.engines.engine_controls import obey, packed, unpacked
from tests.support.engines.engine_wire import LINE_LIMIT, plain_info, read_request, to_json


class _Reporter:
    """Writes events to the parent."""

    def __init__(self) -> None:
        # Everything else that prints, SGLang's processes included, goes to stderr.
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def event(self, name: str, **values: object) -> None:
        self._out.write(to_json({"event": name, **values}) + "\n")
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
        reporter.event("ready", info=plain_info(info))
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
    reader = asyncio.StreamReader(limit=LINE_LIMIT)
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
            request = read_request(command["request"])
            engine.submit(request, _ReportingSink(reporter, request.engine_id))
            if command["abort_at_once"]:
                engine.abort(request.engine_id)
        case "abort":
            engine.abort(command["id"])
        case "limit_transfers":
            engine._runs._transfer_s = command["seconds"]
        case "load":
            load = await engine.load()
            reporter.event("answer", call=command["call"], value=dataclasses.asdict(load))
        case "flush":
            done = await _vendor(engine).tokenizer_manager.flush_cache()
            reporter.event("answer", call=command["call"], value=bool(done.success))
        case "control":
            task = asyncio.create_task(_control(engine, reporter, command))
            _controls.add(task)
            task.add_done_callback(_controls.discard)
        case "bare":
            task = asyncio.create_task(_bare(engine, reporter, command))
            _controls.add(task)
            task.add_done_callback(_controls.discard)
        case "inspect":
            reporter.event("answer", call=command["call"], value=await _inspect(engine))


_controls: set[asyncio.Task[None]] = set()


def _vendor(engine: SglangEngine) -> Any:
    """Return the `sgl.Engine` behind the adapter."""
    assert engine._lifetime._running is not None
    built, _ = engine._lifetime._running
    return built.engine


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


async def _bare(engine: SglangEngine, reporter: _Reporter, command: Mapping[str, Any]) -> None:
    """Ask SGLang itself, past the adapter."""
    params = {"max_new_tokens": command["tokens"], "temperature": 0.0}
    stream = await _vendor(engine).async_generate(
        input_ids=command["token_ids"], sampling_params=params, stream=True
    )
    token_ids = [token async for chunk in stream for token in chunk["output_ids"]]
    reporter.event("answer", call=command["call"], value=token_ids)


async def _inspect(engine: SglangEngine) -> dict[str, object]:
    """Look behind the adapter: SGLang's own view, and its processes."""
    vendor = _vendor(engine)
    manager = vendor.tokenizer_manager
    (load,) = await manager.get_loads()
    return {
        "running": load.num_running_reqs,
        "waiting": load.num_waiting_reqs,
        "used_tokens": load.num_used_tokens,
        "disaggregation": load.to_dict()["disaggregation"],
        "open_requests": len(manager.rid_to_state),
        "tokens_through_sglang": sum(len(s.output_ids) for s in manager.rid_to_state.values()),
        "pids": vendor.get_all_child_pids(),
        "sigterm_is_ours": signal.getsignal(signal.SIGTERM) is signal.SIG_DFL,
    }


def _main() -> None:
    raw = json.loads(sys.argv[1])
    config = SglangEngineConfig(**{**raw, "role": Role(raw["role"])})
    close_after_s = float(sys.argv[2]) if sys.argv[2] else None
    asyncio.run(_serve(config, _Reporter(), close_after_s))


if __name__ == "__main__":
    _main()
