"""One fuzzed call: what is sent, how the client ends it, and what must not come of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from millstream.v1 import errors_pb2
from millstream_testing.waiting import EOF
from tests.benchmarks.fuzzing.messages import MessageMaker, mutate
from tests.benchmarks.fuzzing.seeds import seeds
from tests.benchmarks.fuzzing.targets import Target

_GUARD_S = 10.0
_FORBIDDEN = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.DATA_LOSS,
        grpc.StatusCode.UNAVAILABLE,  # nothing that a client sends may take something away
    }
)
_WRITTEN_TOO_LATE = "Internal error from Core"
"""grpc.aio's client gives a call this status when the server ended it while the client wrote."""
_BUG = "internal error; quote id"
"""How `InternalError` begins. gRPC's table has INTERNAL for messages that can't be read, too."""
_ENDED = "ENDED"
_CLOSE, _CANCEL, _LEAVE_OPEN = "close", "cancel", "leave open"
_WORST = errors_pb2.RequestError.DESCRIPTOR.full_name


@dataclass(frozen=True)
class Script:
    """Everything that is needed to make the call again."""

    server: str
    path: str
    messages: tuple[bytes, ...]
    ending: str = _CLOSE
    """What the client does when it has sent all: close, cancel, or leave open till the deadline."""
    reads: int = 1_000_000
    """Responses that are read before a cancel."""
    deadline_s: float = 2.0
    metadata: tuple[tuple[str, str | bytes], ...] = ()

    def to_json(self) -> str:
        """Write it in a line."""
        fields = dict(vars(self))
        fields["messages"] = [message.hex() for message in self.messages]
        fields["metadata"] = [
            [key, value.hex() if isinstance(value, bytes) else value]
            for key, value in self.metadata
        ]
        return json.dumps(fields)

    @classmethod
    def from_json(cls, line: str) -> Script:
        """Read one that was printed."""
        fields = json.loads(line)
        fields["messages"] = tuple(bytes.fromhex(message) for message in fields["messages"])
        fields["metadata"] = tuple(
            (key, bytes.fromhex(value) if key.endswith("-bin") else value)
            for key, value in fields["metadata"]
        )
        return cls(**fields)


def make_script(chance: random.Random, targets: Sequence[Target]) -> Script:
    """Invent a call."""
    target = _choose(chance, targets)
    method = target.method
    normal = seeds(method.full_name)
    maker = MessageMaker(chance, chance.choice((0.0, 0.02, 0.1, 0.4)))
    if normal and chance.random() < 0.6:
        messages = _damaged(chance, normal)
    else:
        count = chance.choice((1, 1, 2, 5)) if method.client_streaming else 1
        messages = [maker.opening(method.input_type)]
        messages += [maker.make(method.input_type) for _ in range(count - 1)]
        if normal and chance.random() < 0.5:
            messages[:0] = normal[:1]
        if chance.random() < 0.3:
            messages[-1] = mutate(chance, messages[-1], normal)
    if method.client_streaming and chance.random() < 0.05:
        messages = chance.choice(([], messages * 20))
    ending = chance.choice((_CLOSE, _CLOSE, _CLOSE, _CLOSE, _CANCEL, _LEAVE_OPEN))
    unary = not method.client_streaming
    return Script(
        server=target.server,
        path=target.path,
        messages=tuple(messages),
        ending=_CLOSE if unary and ending == _LEAVE_OPEN else ending,
        reads=chance.choice((0, 1, 2, 10)) if ending == _CANCEL else 1_000_000,
        deadline_s=chance.choice((0.001, 0.05, 0.2, 0.2, 0.2, 0.2, 1.0)),
        metadata=_metadata(chance),
    )


def _choose(chance: random.Random, targets: Sequence[Target]) -> Target:
    """Choose a method, ours more often than those that every server has."""
    ours = [target for target in targets if target.path.startswith("/millstream.")]
    return chance.choice(ours if ours and chance.random() < 0.75 else targets)


def _damaged(chance: random.Random, normal: list[bytes]) -> list[bytes]:
    """Damage one of a call's messages, or send them normal but in another order."""
    messages = list(normal)
    at = chance.randrange(len(messages))
    if chance.random() < 0.85:
        messages[at] = mutate(chance, messages[at], normal)
    elif chance.random() < 0.5:
        chance.shuffle(messages)
    return messages[: chance.randint(at + 1, len(messages))]


def _metadata(chance: random.Random) -> tuple[tuple[str, str | bytes], ...]:
    if chance.random() > 0.1:
        return ()
    choices: tuple[tuple[str, str | bytes], ...] = (
        ("traceparent", "00-ffffffffffffffffffffffffffffffff-0000000000000000-zz"),
        ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
        ("tracestate", "=,=,;" * 50),
        ("baggage", "a=%ff%zz,,=;" + "k=v," * 200),
        ("authorization", "Bearer "),
        ("x-fuzz-bin", b"\x00\xff" * 20),
        ("grpc-accept-encoding-x", "\x7e" * 100),
    )
    return (chance.choice(choices),)


@dataclass(frozen=True)
class Outcome:
    """How a call ended; ``problem`` says what may not be."""

    code: str
    problem: str = ""


async def play(script: Script, target: Target, channel: Any) -> Outcome:
    """Make the call and judge its end."""
    outcome = await _play(script, target, channel, pause_s=0.0)
    if outcome.code == _ENDED:  # once more, so slowly that the server's own status gets through
        outcome = await _play(script, target, channel, pause_s=0.02)
    return outcome


async def _play(script: Script, target: Target, channel: Any, pause_s: float) -> Outcome:
    call = channel.stream_stream(script.path)(
        timeout=script.deadline_s, metadata=script.metadata or None
    )
    responses: list[bytes] = []
    writer = asyncio.ensure_future(_write(call, script, pause_s))
    try:
        async with asyncio.timeout(script.deadline_s + _GUARD_S):
            await _read(call, script, responses)
            await asyncio.wait([writer])
            code: grpc.StatusCode = await call.code()
            details = await call.details() or ""
    except TimeoutError:
        call.cancel()
        return Outcome("STUCK", "no status after its deadline")
    finally:
        writer.cancel()
    problem = ""
    if details == _WRITTEN_TOO_LATE:
        return Outcome(_ENDED)
    if code in _FORBIDDEN and not is_callers_fault(code.name, details):
        problem = f"{code.name}: {details}"
    elif code is grpc.StatusCode.CANCELLED and script.ending != _CANCEL:
        problem = f"CANCELLED, but not by the client: {details}"
    return Outcome(code.name, problem or _bad_response(target, responses))


async def _write(call: Any, script: Script, pause_s: float) -> None:
    # When the call is over already, its status says why.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for message in script.messages:
            await call.write(message)
            if pause_s:
                await asyncio.sleep(pause_s)
                if call.done():
                    return
        if script.ending == _CLOSE:
            await call.done_writing()
        elif script.ending == _CANCEL and not script.reads:
            call.cancel()


async def _read(call: Any, script: Script, responses: list[bytes]) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        while len(responses) < script.reads:
            response = await call.read()
            if response is EOF:
                return
            responses.append(response)
        if script.ending == _CANCEL:
            call.cancel()


def is_callers_fault(code: str, details: str) -> bool:
    """Return whether a status INTERNAL is one of gRPC's for what a caller sent."""
    return code == "INTERNAL" and not details.startswith(_BUG)


def _bad_response(target: Target, responses: Sequence[bytes]) -> str:
    """Find a response that doesn't parse, or that tells of a fault of the server's."""
    response_class = GetMessageClass(target.method.output_type)
    for data in responses[:50]:
        try:
            fault = _fault(response_class.FromString(data))
        except DecodeError:
            return f"a response that isn't a {target.method.output_type.full_name}"
        if fault:
            return fault
    return ""


def _fault(message: Message) -> str:
    """Look for a RequestError, at any depth, with a code that may not be."""
    if message.DESCRIPTOR.full_name == _WORST:
        error: Any = message
        codes = {code.value[0] for code in _FORBIDDEN - {grpc.StatusCode.UNAVAILABLE}}
        return f"RequestError {error.code}: {error.message}" if error.code in codes else ""
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for item in value if field.is_repeated else (value,):
            if fault := _fault(item):
                return fault
    return ""
