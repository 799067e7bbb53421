"""The smallest request of each thing that a model does."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Awaitable, Iterable
from typing import Any

from millstream.v1 import generation_pb2, media_pb2, processor_pb2, worker_pb2
from millstream_client import Answer, Client, GeneratedMedia
from millstream_server.cli.client import role_name, role_order

_SIZE = 64
"""Pixels of a side: more than any vision model's least, and few tokens."""
_RED = b"\xff\x00\x00"
_TOKENS = 8
_STEPS = 2
_QUESTION = "Say hello."
_PREFILL, _DECODE = worker_pb2.WORKER_ROLE_PREFILL, worker_pb2.WORKER_ROLE_DECODE


class CheckFailedError(Exception):
    """A step failed; the text says why, ``advice`` what to do."""

    def __init__(self, why: str, advice: str = "") -> None:
        super().__init__(why)
        self.advice = advice


def small_png() -> bytes:
    """Return a red square as a PNG file."""
    header = struct.pack(">IIBBBBB", _SIZE, _SIZE, 8, 2, 0, 0, 0)  # 8 bits a channel, RGB
    rows = (b"\x00" + _RED * _SIZE) * _SIZE  # each begins with its filter, none
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def connected(model: processor_pb2.ServedModel) -> str:
    """Return how many workers of each role are connected, in words."""
    pools = sorted(model.workers, key=lambda pool: role_order(pool.role))
    counts = [f"{pool.connected} {role_name(pool.role)}" for pool in pools if pool.connected]
    return ", ".join(counts) or "no workers"


def lacking(model: processor_pb2.ServedModel) -> str:
    """Return which workers a model that isn't ready lacks, as far as it can be known."""
    roles = _roles(model)
    if _DECODE in roles and _PREFILL not in roles:
        return "prefill workers"
    if _PREFILL in roles and _DECODE not in roles:
        return "decode workers"
    return "workers"


class Asked:
    """One model's requests."""

    def __init__(self, client: Client, model: processor_pb2.ServedModel, timeout_s: float) -> None:
        self._client = client
        self._model = model
        self._timeout_s = timeout_s
        self._short: Any = {"max_new_tokens": _TOKENS, "temperature": 0.0}
        self._to: Any = {"model": model.name, "timeout_s": timeout_s}

    def steps(self, *, disaggregated: bool) -> list[Awaitable[str]]:
        """Return a step for each thing that the model does; each returns what came of it."""
        tasks = set(self._model.tasks)
        steps: list[Awaitable[str]] = []
        if tasks & {processor_pb2.MODEL_TASK_CHAT, processor_pb2.MODEL_TASK_COMPLETE}:
            chats = processor_pb2.MODEL_TASK_CHAT in tasks
            steps.append(self.text(chats=chats, disaggregated=disaggregated))
            if chats and media_pb2.MODALITY_IMAGE in self._model.modalities:
                steps.append(self.picture())
        others = {
            processor_pb2.MODEL_TASK_EMBED: self.embed,
            processor_pb2.MODEL_TASK_RERANK: self.rerank,
            processor_pb2.MODEL_TASK_GENERATE_IMAGE: self.image,
            processor_pb2.MODEL_TASK_GENERATE_VIDEO: self.video,
        }
        return steps + [ask() for task, ask in others.items() if task in tasks]

    async def text(self, *, chats: bool, disaggregated: bool) -> str:
        before = _roles(self._model)
        ask = self._client.chat if chats else self._client.complete
        tokens = _tokens(await ask(_QUESTION, **self._short, **self._to).answer())
        way = await self._way(before, disaggregated=disaggregated)
        return f"{'chat' if chats else 'complete'}: {tokens} tokens{way}"

    async def picture(self) -> str:
        answer = await self._client.chat(
            _QUESTION, image=small_png(), **self._short, **self._to
        ).answer()
        return f"chat with an image: {_tokens(answer)} tokens"

    async def _way(self, before: frozenset[int], *, disaggregated: bool) -> str:
        """Return which workers answered, as far as it is certain.

        A decode worker refuses a request without the ticket of a prefill worker. So an answer came
        through both if the model has both, and had no aggregated worker before and after it.
        """
        if not disaggregated and not {_PREFILL, _DECODE} <= before:
            return ""
        models = await self._client.models(timeout_s=self._timeout_s)
        after = next((_roles(m) for m in models if m.name == self._model.name), frozenset[int]())
        alone = worker_pb2.WORKER_ROLE_AGGREGATED not in before | after
        if {_PREFILL, _DECODE} <= before & after and alone:
            return ", through prefill and decode"
        if not disaggregated:
            return ", through prefill and decode or through an aggregated worker"
        raise CheckFailedError(
            f"answered, but it isn't certain that prefill workers took part ({_words(after)} "
            "workers are connected)",
            "prefill and decode workers have to be connected, and no aggregated one",
        )

    async def embed(self) -> str:
        result = await self._client.embed(_QUESTION, **self._to)
        lengths = [len(vector) for vector in result.vectors]
        if len(lengths) != 1 or not any(result.vectors[0]):
            raise CheckFailedError(f"vectors of {lengths} numbers, or of zeros", "see its log")
        return f"embed: a vector of {lengths[0]} numbers"

    async def rerank(self) -> str:
        documents = ("Hello.", "Goodbye.")
        ranked = await self._client.rerank(_QUESTION, documents, **self._to)
        if len(ranked) != len(documents):
            raise CheckFailedError(f"{len(ranked)} scores for {len(documents)} documents")
        return f"rerank: {len(ranked)} scores"

    async def image(self) -> str:
        size, steps = self._smallest()
        stream = self._client.generate_image(
            _QUESTION, width=size, height=size, steps=steps, **self._to
        )
        return f"image: {_media(await stream.result(), size, steps)}"

    async def video(self) -> str:
        size, steps = self._smallest()
        limits = self._model.diffusion
        frames = min(1 + max(limits.frame_step, 1), limits.max_frames or 1 << 30)
        stream = self._client.generate_video(
            _QUESTION, width=size, height=size, steps=steps, frames=frames, **self._to
        )
        return f"video: {_media(await stream.result(), size, steps)}"

    def _smallest(self) -> tuple[int, int]:
        """Return the least width and height, and few steps."""
        limits = self._model.diffusion
        step = max(limits.size_step, 1)
        size = max(-(-limits.min_size // step), 1) * step
        return size, min(_STEPS, limits.max_steps or _STEPS)


def _tokens(answer: Answer) -> int:
    tokens = answer.usage.completion_tokens
    if not answer.complete or not tokens:
        reason = generation_pb2.FinishReason.Name(answer.finish_reason)
        raise CheckFailedError(f"an answer of {tokens} tokens, {reason}", "see the worker's log")
    return tokens


def _media(made: GeneratedMedia, size: int, steps: int) -> str:
    files = [f"{len(f.data)} bytes" if f.data else f.url for f in made.files]
    if len(files) != 1 or not files[0]:
        raise CheckFailedError(f"{len(files)} files, or an empty one", "see the worker's log")
    return f"{size}x{size} in {steps} steps, {files[0]}"


def _roles(model: processor_pb2.ServedModel) -> frozenset[int]:
    return frozenset(pool.role for pool in model.workers if pool.connected)


def _words(roles: Iterable[int]) -> str:
    return " and ".join(sorted(map(role_name, roles))) or "no"
