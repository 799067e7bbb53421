"""What a client got of one answer, and what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millstream.v1 import generation_pb2, processor_pb2
from millstream_server.formats import events as read
from millstream_server.formats.families import FORMATS
from millstream_server.formats.parser import Parser
from millstream_server.formats.schema import Tools
from millstream_server.processor.text.detokenizer import detokenizer
from tests.support.simulation.requests import SCHEMA, Course, Turn

Piece = tuple[str, str]
"""A piece of an answer that is read: its kind, and its content."""


@dataclass
class Choice:
    """One choice, as far as it came."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    calls: list[Piece] = field(default_factory=list)
    """Of the last delta: names and arguments."""
    logprobs: list[int] = field(default_factory=list)
    """The tokens that have one."""
    counted: int = 0
    reason: str = ""
    matched: int | str | None = None
    ids: list[str] = field(default_factory=list)
    """Of its calls."""
    whole_calls: list[str] = field(default_factory=list)
    """Ids of those that can be run."""

    def take(self, delta: processor_pb2.ChoiceDelta) -> None:
        self.tokens.extend(delta.token_ids)
        self.counted += delta.token_count
        self.text += delta.text
        self.logprobs.extend(entry.token_id for entry in delta.logprobs)
        for event in delta.events:
            self._take_event(event)
        if delta.finish_reason:
            name = generation_pb2.FinishReason.Name(delta.finish_reason)
            self.reason = name.removeprefix("FINISH_REASON_")
            self.calls = [(call.name, call.arguments_json) for call in delta.tool_calls]
        if delta.HasField("matched_stop"):
            stop = delta.matched_stop
            self.matched = stop.text or stop.token_id

    def _take_event(self, event: processor_pb2.OutputEvent) -> None:
        kind = event.WhichOneof("event")
        if kind == "tool_call_start":
            self.ids.append(event.tool_call_start.id)
            _add(self.pieces, "call", event.tool_call_start.name)
        elif kind == "tool_call_arguments_json":
            _add(self.pieces, "arguments", event.tool_call_arguments_json)
        elif kind == "tool_call_end":
            _add(self.pieces, "end", str(event.tool_call_end.incomplete))
            if not event.tool_call_end.incomplete:
                self.whole_calls.append(self.ids[-1])
        elif kind is not None:
            _add(self.pieces, kind, getattr(event, kind))


def _add(pieces: list[Piece], kind: str, content: str) -> None:
    if kind in ("text", "reasoning", "arguments") and pieces and pieces[-1][0] == kind:
        pieces[-1] = (kind, pieces[-1][1] + content)
    else:
        pieces.append((kind, content))


@dataclass
class Answer:
    """What one client got of one turn or completion."""

    choices: dict[int, Choice] = field(default_factory=dict)
    started: int = 0
    finished: list[processor_pb2.TurnFinished] = field(default_factory=list)
    late: int = 0
    """Things that came after their end."""
    prompt_logprobs: list[int] = field(default_factory=list)
    resumed: bool = False
    """The client has gone on with it at another Processor."""

    def take(self, message: Any) -> None:
        self.late += bool(self.finished)
        self.started += message.HasField("started")
        for delta in message.choices:
            choice = self.choices.setdefault(delta.index, Choice())
            self.late += bool(choice.reason)
            choice.take(delta)
        self.prompt_logprobs.extend(entry.token_id for entry in message.prompt_logprobs)
        if message.HasField("finished"):
            self.finished.append(message.finished)

    @property
    def cancelled(self) -> bool:
        return any(choice.reason == "CANCELLED" for choice in self.choices.values())


def wrong_answer(
    answer: Answer, course: Course, lies: Sequence[int], turn: Turn | None, form: str
) -> list[str]:
    """Hold an answer, whole or cut, against its right course.

    ``turn``: its answer is read, in the notation of the model's format ``form``. With ``lies``
    workers may have added one of these to each token.
    """
    found = [f"{answer.late} things came after an end"] if answer.late else []
    for index, choice in answer.choices.items():
        found += filter(None, [_wrong_tokens(index, choice, course, lies)])
        found += [f"choice {index}: {what}" for what in _wrong_end(choice, course)]
        if not found:
            wrong = _wrong_text(choice, course, resumed=answer.resumed) if turn is None else []
            wrong += _wrong_pieces(choice, course, turn, form) if turn is not None else []
            found += [f"choice {index}: {what}" for what in wrong]
    if answer.finished:
        found += _wrong_usage(answer, course)
    return found


def wrong_resumed(answer: Answer, course: Course, turn: Turn | None, form: str) -> list[str]:
    """Hold a chat that its client went on with by its text: its tokens may be others."""
    choice = answer.choices.get(0, Choice())
    said = choice.text + _text_of(choice.pieces)
    raw = course.text.decode(list(course.told or ()))

    def cut(end: int) -> str:
        return raw[:end] if turn is None else _text_of(read_whole(raw[:end], form, turn))

    whole = choice.reason in ("STOP", "TOOL_CALLS")
    ends = [len(raw)] if whole else range(len(raw) + 1)
    if any(said == cut(end) for end in ends):
        return []
    return [f"it went on at another Processor, and says {said!r}, which no part of {raw!r} means"]


def _text_of(pieces: Sequence[Piece]) -> str:
    return "".join(content for kind, content in pieces if kind == "text")


def _wrong_tokens(index: int, choice: Choice, course: Course, lies: Sequence[int]) -> str:
    wrong = [course.wrong(index, choice.tokens, lies=lie) for lie in (0, *lies)]
    if choice.counted != len(choice.tokens):
        return f"choice {index} has {len(choice.tokens)} tokens, and counts {choice.counted}"
    if course.knobs.logprobs and choice.logprobs != choice.tokens:
        return f"choice {index} has logprobs of {choice.logprobs}, and tokens {choice.tokens}"
    return "" if "" in wrong else wrong[0]


def _wrong_end(choice: Choice, course: Course) -> list[str]:
    end = course.end(choice.tokens)
    reason = "STOP" if choice.reason == "TOOL_CALLS" else choice.reason
    if reason not in ("", "CANCELLED") and (end is None or reason != end[0]):
        return [f"it ended by {choice.reason} after {len(choice.tokens)} tokens, not by {end}"]
    if choice.reason == "STOP" and end is not None and choice.matched != end[1]:
        return [f"it ended by {choice.matched!r}, not {end[1]!r}"]
    return []


def _shown(choice: Choice, course: Course) -> tuple[str, str]:
    """Return the text of what came, up to a stop string; and what is behind it."""
    tokens = choice.tokens
    if choice.reason in ("STOP", "TOOL_CALLS") and tokens and choice.matched != course.knobs.stop:
        tokens = tokens[:-1] if tokens[-1] in course.text.eos_token_ids else tokens
    reader = detokenizer(course.text, continuation=True, behind=course.behind)
    said = reader.push(tokens) + (reader.flush() if choice.reason else "")
    stop = course.knobs.stop
    before, found, _ = said.partition(stop) if stop else (said, "", "")
    return before, found


def _wrong_text(choice: Choice, course: Course, *, resumed: bool) -> list[str]:
    said, _ = _shown(choice, course)
    if resumed:  # half a character that nothing completes was the lost Processor's to show
        said, choice.text = said.replace("\ufffd", ""), choice.text.replace("\ufffd", "")
    held = len(course.knobs.stop) if not choice.reason else 0  # it may be a stop's beginning
    if said.startswith(choice.text) and len(choice.text) >= len(said) - held:
        return []
    return [f"it says {choice.text!r}, not {said!r}"]


def _wrong_pieces(choice: Choice, course: Course, turn: Turn, form: str) -> list[str]:
    """Compare with what the whole text means, read in one piece."""
    if choice.text:
        return [f"it has text beside its events: {choice.text!r}"]
    if not choice.reason:
        whole = read_whole(turn.written(form), form, turn)
        return [] if _begins(whole, choice.pieces) else [f"{choice.pieces} don't begin {whole}"]
    whole = read_whole(_shown(choice, course)[0], form, turn)
    if choice.pieces != whole:
        return [f"it has {choice.pieces}, not {whole}"]
    ended = _calls(whole)
    if choice.calls != ended:
        return [f"the last delta has the calls {choice.calls}, not {ended}"]
    if choice.reason == "TOOL_CALLS" or (choice.reason == "STOP" and not course.knobs.stop):
        return _wrong_meaning(choice, turn)
    return []


def _wrong_meaning(choice: Choice, turn: Turn) -> list[str]:
    """Compare a whole answer with what its turn was made of: no parser of ours says it."""
    content = dict.fromkeys(("reasoning", "text"), "")
    for kind, piece in choice.pieces:
        if kind in content:
            content[kind] += piece
    calls = [(name, json.loads(arguments)) for name, arguments in choice.calls]
    found = content["reasoning"].strip(), content["text"].strip(), calls
    right = turn.thinking, turn.text, [(name, {"s": value}) for name, value in turn.calls]
    wrong = [] if found == right else [f"it means {found}, not {right}"]
    expected = "TOOL_CALLS" if turn.calls else "STOP"
    if choice.reason != expected:
        wrong.append(f"it ended by {choice.reason}, not {expected}")
    if len(set(choice.ids)) != len(turn.calls):
        wrong.append(f"its calls have the ids {choice.ids}")
    return wrong


def read_whole(text: str, form: str, turn: Turn) -> list[Piece]:
    """Read an answer in one piece."""
    parser = Parser(FORMATS[form], Tools({name: SCHEMA for name, _ in turn.calls}))
    pieces: list[Piece] = []
    for event in [*parser.feed(text, ()), *parser.finish()]:
        match event:
            case read.Text(content):
                _add(pieces, "text", content)
            case read.Reasoning(content):
                _add(pieces, "reasoning", content)
            case read.CallStart(name=name):
                _add(pieces, "call", name)
            case read.Arguments(json=content):
                _add(pieces, "arguments", content)
            case read.CallEnd(incomplete=incomplete):
                _add(pieces, "end", str(incomplete))
    return pieces


def _calls(pieces: Sequence[Piece]) -> list[Piece]:
    calls: list[Piece] = []
    for kind, content in pieces:
        if kind == "call":
            calls.append((content, ""))
        elif kind == "arguments":
            calls[-1] = (calls[-1][0], content)
    return calls


def _begins(whole: Sequence[Piece], pieces: Sequence[Piece]) -> bool:
    """Whether the pieces are the beginning of a whole answer's; the last one may be cut."""
    *before, (kind, content) = pieces or [("", "")]
    if not pieces:
        return True
    count = len(before)
    if count >= len(whole) or list(whole[:count]) != before:
        return False
    return whole[count][0] == kind and whole[count][1].startswith(content)


def _wrong_usage(answer: Answer, course: Course) -> list[str]:
    usage, knobs = answer.finished[-1].usage, course.knobs
    found: list[str] = []
    came = sum(choice.counted for choice in answer.choices.values())
    if usage.completion_tokens != came:
        found.append(f"{usage.completion_tokens} tokens were counted, {came} came")
    if usage.prompt_tokens != course.prompt_tokens:
        found.append(f"the prompt has {course.prompt_tokens} tokens, not {usage.prompt_tokens}")
    if usage.cached_tokens > course.prompt_tokens:
        found.append(f"{usage.cached_tokens} of {course.prompt_tokens} tokens were cached")
    ended = [choice for choice in answer.choices.values() if choice.reason]
    if len(ended) != knobs.n:
        found.append(f"{len(ended)} of {knobs.n} choices have ended in a finished answer")
    if (answer.started, len(answer.finished)) != (1, 1):
        found.append(f"{answer.started} starts and {len(answer.finished)} ends in an OK answer")
    return found
