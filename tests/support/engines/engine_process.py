"""An `SglangEngine` in a process of its own, driven over JSON lines.

SGLang keeps its state in process globals, so prefill, decode and aggregated engines of one test
each need a process; and a test that kills an engine must survive it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream_server.control.engine import EngineLoad, Role
from millstream_server.generation.generator import GeneratorInfo
from millstream_server.generation.output import CollectingSink, Finish
from millstream_server.generation.request import GenerationRequest, Prompt
from millstream_server.runtime import errors
from tests.support.engines.engine_controls import packed, unpacked
from tests.support.engines.engine_wire import (
    LINE_LIMIT,
    plain_item,
    read_finish,
    read_info,
    read_kv_event,
    read_load,
    read_logprobs,
    to_json,
)
from tests.support.processes import forked
from tests.support.worker.kv_view import KvView

# One thread per engine is the fastest a model this small can be, and leaves the others a core.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
_START_TIMEOUT_S = 300.0
_CLOSE_TIMEOUT_S = 60.0


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
                "tests.support.engines.engine_child",
                [to_json(config), str(close_after_s or "")],
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
        reader = asyncio.StreamReader(limit=LINE_LIMIT)
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
                self._ready.set_result(read_info(event["info"]))
            case "not_started":
                self._ready.set_exception(getattr(errors, event["type"])(event["message"]))
            case "emit":
                logprobs = read_logprobs(event["logprobs"])
                self._sinks[event["id"]].emit(event["token_ids"], logprobs)
            case "finish":
                self._sinks[event["id"]].finish(read_finish(event["finish"]))
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
                self.kv.changed(event["rank"], [read_kv_event(each) for each in event["events"]])
            case "engine_failed":
                self.failures += 1
                self.engine_failed.set()

    def _send(self, **command: object) -> None:
        assert self._stdin is not None
        if self._reader is None or self._reader.done():
            raise RuntimeError("the engine's process ended")
        self._stdin.write((to_json(command) + "\n").encode())

    def submit(self, request: GenerationRequest, *, abort_at_once: bool = False) -> CollectingSink:
        """Start a request; with ``abort_at_once`` it is aborted in the same loop iteration."""
        sink = self._sinks[request.engine_id] = _Sink()
        media = [plain_item(item) for item in request.prompt.media]
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

    def limit_transfers(self, seconds: float) -> None:
        """Let the KV transfers that begin from now on take no longer."""
        self._send(op="limit_transfers", seconds=seconds)

    async def load(self) -> EngineLoad:
        """Ask the adapter."""
        return read_load(await self._call("load"))

    async def flush(self) -> bool:
        """Empty SGLang's prefix cache; answers whether it did."""
        return bool(await self._call("flush"))

    async def bare(self, token_ids: list[int], tokens: int) -> list[int]:
        """Ask SGLang behind the adapter's back for so many tokens."""
        answer: list[int] = await self._call("bare", token_ids=token_ids, tokens=tokens)
        return answer

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
